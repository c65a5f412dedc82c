"""The house rules over the whole package. Each rule must also catch a bad example, or it guards nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.house import rules

Rule = Callable[[str, str], list[str]]

# What a rule forbids and a file does nonetheless, with the reason.
EXCEPTIONS = {
    (rules.loops_forward, "ops/fused/mlp.py"): "a backward pass goes back over layers, not over time",
    (
        rules.quiet,
        "nets/language/pretrained.py",
    ): "the cache of dequantized weights and the exported model are not run output",
    (rules.quiet, "nets/sequence/vla.py"): "the exported policy is not run output",
    (rules.nameless, "nets/precision.py"): "asks a given device whether it multiplies bfloat16, or records a graph",
    (rules.nameless, "training/graphs.py"): "records a graph on the device of its inputs, if it is one that can",
}
SOURCE_RULES = [
    rules.imports_down,
    rules.loops_forward,
    rules.quiet,
    rules.nameless,
    rules.composes,
    rules.documented,
]


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    files = rules.modules()
    assert len(files) > 20
    bad = [line for path, source in files.items() if (rule, path) not in EXCEPTIONS for line in rule(path, source)]
    assert not bad, "\n" + "\n".join(bad)


def test_the_pages_and_presets_are_in_plain_words() -> None:
    generated = ("docs/results.md", "docs/invariants.md")  # from the titles of results and the docstrings of tests
    pages = {
        path: text
        for path, text in rules.texts().items()
        if (path.endswith(".md") and path not in generated) or path.startswith("foresight/presets/")
    }
    pages = {
        path: text for path, text in pages.items() if path.startswith(("foresight/", "docs/")) or path.count("/") < 2
    }
    assert len(pages) > 120
    bad = [line for path, text in pages.items() for line in rules.plain_words(path, text)]
    assert not bad, "\n" + "\n".join(bad)


def test_the_source_that_is_clean_stays_in_plain_words() -> None:
    files = {path: source for path, source in rules.modules().items() if path.startswith(rules.PLAIN_SOURCE)}
    assert files.keys() >= set(rules.OLD_NAMES)
    files = {path: source for path, source in files.items() if path not in rules.OLD_NAMES}
    assert {entry for entry in rules.PLAIN_SOURCE if not any(p.startswith(entry) for p in files)} == set()
    bad = [line for path, source in files.items() for line in rules.plain_words(path, source)]
    assert not bad, "\n" + "\n".join(bad)


def test_tests_are_in_plain_words() -> None:
    """Their names, docstrings and comments; but not the tests of this rule, which hold the retired words."""
    tests = {path: text for path, text in rules.texts().items() if path.startswith("tests/") and path.endswith(".py")}
    tests = {path: text for path, text in tests.items() if not path.startswith("tests/house/")}
    assert len(tests) > 150
    tests = {path: rules.prose(text) for path, text in tests.items() if rules.suspicious(text)}
    bad = [line for path, text in tests.items() for line in rules.plain_words(path, text)]
    assert not bad, "\n" + "\n".join(bad)


def test_prose_is_comments_docstrings_and_test_names() -> None:
    source = 'world = 1  # a world\n\ndef test_what_it_says():\n    """Told."""\n    said = "heard"\n'
    assert rules.prose(source).split("\n") == ["# a world", "", "test what it says", '    """Told."""', ""]


@pytest.mark.parametrize(
    "text",
    [
        "Each world is reset.",
        "The run says so.",
        "It goes on.",
        "Rewards are judged.",
        "It is learned\nfrom? Learnt.",
        "HEIRS",
    ],
)
def test_a_retired_word_is_caught(text: str) -> None:
    assert rules.plain_words("docs/x.md", text) and rules.suspicious(f"def test_it(): ...  # {text}")
    assert rules.suspicious(f"def test_{'_'.join(text.split())}(): ...")


@pytest.mark.parametrize(
    "text",
    [
        "A world model in a grid world.",
        "An LLM judge.",
        "`world` in code",
        "```\nworld\n```",
        "[x](world/says.md)",
        "GridWorld8x8",
    ],
)
def test_words_of_the_field_and_names_in_code_pass(text: str) -> None:
    assert rules.plain_words("docs/x.md", text) == []


def test_no_exception_outlives_its_reason() -> None:
    files = rules.modules()
    assert [path for rule, path in EXCEPTIONS if not rule(path, files[path])] == []


def test_every_file_stands_on_a_floor() -> None:
    for path in rules.modules():
        rules.floor(path)


def test_no_package_holds_too_many_modules() -> None:
    assert rules.small_packages(rules.modules()) == []


def test_a_package_that_is_too_large_is_caught() -> None:
    package = ["ops/__init__.py", *(f"ops/m{i}.py" for i in range(rules.LARGEST_PACKAGE))]
    assert rules.small_packages([*package, "nets/x.py", "ops/inner/x.py"]) == []
    assert rules.small_packages([*package, "nets/x.py", "ops/x.py"])


def test_every_algorithm_file_has_the_same_order() -> None:
    files = rules.algorithm_files()
    assert len(files) >= 5
    bad = [line for path, source in files.items() for line in rules.in_order(path, source)]
    assert not bad, "\n" + "\n".join(bad)


def test_every_algorithm_file_has_its_test_file() -> None:
    files = {path: rules.test_file(path) for path in rules.algorithm_files()}
    assert len(files) >= 50
    tests = {path: file.read_text(encoding="utf-8") if file.is_file() else None for path, file in files.items()}
    bad = [line for path, source in tests.items() for line in rules.tested(path, source)]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    [None, "", "def test_a(): ...", "def check():\n    assert True", "def test_a():\n    check(1)", "assert True"],
)
def test_an_algorithm_without_a_test_is_caught(source: str | None) -> None:
    (line,) = rules.tested("algorithms/policy/x.py", source)
    assert "tests/algorithms/policy/test_x.py" in line


@pytest.mark.parametrize(
    "body",
    [
        "assert f() == 1",
        "torch.testing.assert_close(a, b)",
        "np.testing.assert_array_equal(a, b)",
        "with pytest.raises(UserError):\n        f()",
    ],
)
def test_a_test_that_asserts_is_one(body: str) -> None:
    assert rules.tested("algorithms/policy/x.py", f"def test_a():\n    {body}\n") == []


def test_lists_and_help_do_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "import foresight, foresight.cli.main\n"
        "from foresight.runtime import catalog\n"
        "for name in catalog.algorithms():\n"
        "    catalog.config_class(name), catalog.presets(name)\n"
        "assert len(catalog.algorithms()) >= 5\n"
        "heavy = {'torch', 'gymnasium', 'transformers', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=rules.ROOT)
    assert done.returncode == 0, done.stderr


# ---- sabotage: a bad example that each rule must catch, and a good one that it must let pass -------------------------

BAD = [
    (rules.imports_down, "ops/x.py", "from foresight.nets import mlp"),
    (rules.imports_down, "data/x.py", "def f():\n    import foresight.envs.base"),
    (rules.imports_down, "nets/x.py", "from foresight.envs.base import Env"),
    (rules.imports_down, "envs/x.py", "from foresight import nets"),
    (rules.imports_down, "algorithms/policy/x.py", "from foresight.algorithms.policy import ppo"),
    (rules.imports_down, "algorithms/policy/x.py", "from foresight.algorithms.tabular.y import act"),
    (rules.imports_down, "planning/x.py", "from foresight.runtime import run"),
    (rules.imports_down, "ops/x.py", "from . import returns"),
    (rules.imports_down, "errors.py", "from foresight.ops import returns"),
    (rules.imports_down, "ops/x.py", "import foresight.attic"),
    (rules.loops_forward, "algorithms/x.py", "for t in reversed(range(9)): pass"),
    (rules.loops_forward, "data/x.py", "for t in range(9, -1, -1): pass"),
    (rules.loops_forward, "nets/x.py", "y = x.flip(1).cumsum(1).flip(1)"),
    (rules.loops_forward, "nets/x.py", "y = torch.flip(x, dims=(1,))"),
    (rules.loops_forward, "nets/x.py", "y = x.flip(dim)"),
    (rules.loops_forward, "nets/x.py", "y = np.flip(x)"),
    (rules.quiet, "ops/x.py", "print(1)"),
    (rules.quiet, "envs/x.py", "import logging"),
    (rules.quiet, "nets/x.py", "with open(name, 'wb') as f: pass"),
    (rules.quiet, "nets/x.py", "with open(name, mode=how) as f: pass"),
    (rules.quiet, "data/x.py", "path.open('a')"),
    (rules.quiet, "data/x.py", "path.write_text('a')"),
    (rules.quiet, "algorithms/x.py", "torch.save(state, path)"),
    (rules.nameless, "nets/x.py", "x = y.to('cuda')"),
    (rules.nameless, "algorithms/x.py", "device = 'cuda:0'"),
    (rules.nameless, "algorithms/x.py", "if torch.cuda.is_available(): pass"),
    (rules.nameless, "planning/x.py", "x = x.cuda()"),
    (rules.composes, "nets/x.py", "class A: pass\nclass B(A): pass"),
    (rules.composes, "nets/x.py", "from foresight.nets.mlp import MLP\nclass B(MLP): pass"),
    (rules.composes, "nets/x.py", "import foresight.nets.mlp as m\nclass B(m.MLP): pass"),
    (rules.composes, "nets/x.py", "class A(Generic[T]): pass\nclass B(A[int]): pass"),
    (rules.composes, "nets/x.py", "class A(Protocol): pass\nclass B(A): pass"),
    (rules.documented, "ops/x.py", "def f(): pass"),
    (rules.documented, "ops/x.py", '"""M."""\ndef f(): pass'),
    (rules.documented, "ops/x.py", '"""M."""\nclass A:\n    """A."""\n    def f(self): pass'),
]
GOOD = [
    (
        rules.imports_down,
        "ops/x.py",
        "from foresight.errors import UserError\nfrom foresight.ops import returns\nimport torch",
    ),
    (rules.imports_down, "algorithms/policy/x.py", "from foresight.envs.base import Env\nfrom foresight import ops"),
    (
        rules.imports_down,
        "runtime/x.py",
        "from foresight import __version__\nfrom foresight.algorithms.policy import ppo",
    ),
    (rules.loops_forward, "ops/returns.py", "for t in reversed(range(9)): pass"),
    (rules.loops_forward, "ops/x.py", "for t in reversed(names): pass\nfor t in range(1, 9, 2): pass\ny = x.flip(-1)"),
    (rules.loops_forward, "runtime/x.py", "pygame.display.flip()"),
    (rules.quiet, "ops/x.py", "with open(name) as f: pass\nopen(name, 'rb')\npath.open()\npath.open('rb')"),
    (rules.quiet, "runtime/x.py", "import logging\nprint(1)\nopen(name, 'w')"),
    (rules.nameless, "nets/x.py", "def f(device='cpu'):\n    return y.to(x.device)"),
    (rules.nameless, "runtime/x.py", "device = 'cuda'"),
    (rules.composes, "nets/x.py", "class A(nn.Module): pass\nclass B(NamedTuple): pass\nclass C(Protocol): pass"),
    (rules.composes, "nets/x.py", "from foresight.errors import UserError\nclass LostError(UserError): pass"),
    (rules.composes, "nets/x.py", "class A(Protocol): pass\nclass B(A, Protocol[T]): pass"),
    (rules.documented, "ops/x.py", '"""M."""\ndef f():\n    """F."""\n    def g(): pass\ndef _h(): pass'),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=lambda x: getattr(x, "__name__", None))
def test_a_rule_catches(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(("rule", "path", "source"), GOOD, ids=lambda x: getattr(x, "__name__", None))
def test_a_rule_lets_pass(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []


FILE = '''"""NAME: A Paper (arXiv:1234.56789). max Σ r."""

KIND = "control"
UNIT = "env steps"
METRICS = ("return",)

@dataclass(frozen=True)
class Config:
    """Numbers."""

    steps: int = 1
    gamma: float = 0.99  # per step; table 1

@dataclass
class State:
    """State."""

def build(): ...

def act(): ...

def update(): ...

def train():
    yield 1
'''

MUTATIONS = [
    ("no docstring", FILE.split("\n", 1)[0], ""),
    ("no paper", " (arXiv:1234.56789)", ""),
    ("no unicode", "Σ", "sum of"),
    ("no UNIT", 'UNIT = "env steps"\n', ""),
    ("no METRICS", "METRICS", "NUMBERS"),
    ("no act", "def act", "def _act"),
    ("another order", "def build", "def train(): yield 1\ndef build"),
    ("a loose Config", "(frozen=True)", ""),
    ("a silent field", "  # per step; table 1", ""),
    ("no dataclass", "@dataclass\nclass State", "class State"),
    ("no generator", "yield 1", "return 1"),
]


def test_the_order_lets_a_good_file_pass() -> None:
    assert rules.in_order("algorithms/x.py", FILE) == []
    assert rules.in_order("algorithms/x.py", FILE.replace("def update", "def act_and_update")) == []  # a compiled loop


@pytest.mark.parametrize(("old", "new"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_the_order_catches(old: str, new: str) -> None:
    assert old in FILE
    assert rules.in_order("algorithms/x.py", FILE.replace(old, new, 1))


def piped(makefile: str) -> list[str]:
    """The recipes with a pipe that succeed if only the last command of the pipe does."""
    recipes = [line[1:] for line in makefile.replace("\\\n", " ").splitlines() if line.startswith("\t")]
    bare = [re.sub(r"'[^']*'|\"[^\"]*\"", "", line).replace("||", "") for line in recipes]
    return [line for line, plain in zip(recipes, bare, strict=True)
            if "|" in plain and not line.lstrip("@").startswith("set -o pipefail; ")]  # fmt: skip


def test_a_failed_command_before_a_pipe_fails_its_recipe():
    assert piped((rules.ROOT / "Makefile").read_text(encoding="utf-8")) == []
    assert piped("x:\n\tpip install y | awk 1\n") == ["pip install y | awk 1"]
    assert piped("x:\n\ttest -x y || echo 'a | b'\n\t@set -o pipefail; a | b\n") == []


def test_scripts_use_no_options_of_gnu():
    scripts = sorted((rules.ROOT / ".ci").iterdir())
    assert scripts and not [script.name for script in scripts if "realpath -s" in script.read_text(encoding="utf-8")]
