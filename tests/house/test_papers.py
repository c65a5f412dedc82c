"""What the pages, the presets and the results promise is there."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from foresight.cli.main import main
from foresight.runtime import catalog
from foresight.training.options import field_types
from tests.house import rules

DOCS = rules.ROOT / "docs"
README = (rules.ROOT / "README.md").read_text(encoding="utf-8")
RUNTIME_KEYS = {"env", "env_options", "task", "source", "evaluation", "kind"}
RESULT_KEYS = {"what", "command", "versions", "machine", "seconds"}


def test_nothing_names_a_machine_a_registry_or_how_it_was_made() -> None:
    texts = rules.texts()
    assert "README.md" in texts and "foresight/errors.py" in texts and ".ci/run" in texts
    bad = [line for path, text in texts.items() for line in rules.anonymous(path, text)]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "text",
    [
        "see /wo" + "rk/x",
        "in /tm" + "p/wheels",
        "/ho" + "me/me/x",
        "from py" + "pi.org",
        "--index" + "-url x",
        "Copi" + "lot",
    ],
)
def test_anonymity_catches(text: str) -> None:
    assert rules.anonymous("x", f"fine\n{text}\n")


@pytest.mark.parametrize("text", ["the work/life of /tmp", "home/page", "the role 'assistant' of an agent"])
def test_anonymity_lets_pass(text: str) -> None:
    assert rules.anonymous("x", text) == []


def test_links_lead_somewhere() -> None:
    pages = {path: text for path, text in rules.texts().items() if path.endswith(".md")}
    assert len(pages) >= 4
    bad = [line for path, text in pages.items() for line in rules.links(path, text)]
    assert not bad, "\n" + "\n".join(bad)


def test_a_dead_link_is_caught(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    assert rules.links("b.md", "[a](a.md) [a](a.md#part) [out](https://example.com)", tmp_path) == []
    assert rules.links("b.md", "[c](c.md)", tmp_path)


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((rules.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    site = runpy.run_path(str(DOCS / "site.py"))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    given, known = leaves(nav), {*pages, *site["TOPS"].values(), "reference/index.md"}
    assert len(given) == len(set(given)) and set(given) <= known
    assert known - set(given) == set(), "add them to the navigation in mkdocs.yml"
    assert [next(iter(part)) for part in nav] == [
        "Start",
        "Learn",
        "Algorithms",
        "How to",
        "Compare",
        "Reference",
    ]


def test_the_paper_index_is_complete() -> None:
    index = (DOCS / "paper_index.md").read_text(encoding="utf-8")
    pages = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if p.stem in catalog.algorithms()]
    assert rules.indexed(index, list(rules.algorithm_files()), pages) == []


def test_a_gap_in_the_paper_index_is_caught() -> None:
    index = "`foresight/algorithms/policy/ppo.py` [ppo](ppo.md)"
    assert rules.indexed(index, ["algorithms/policy/ppo.py"], ["ppo.md"]) == []
    assert rules.indexed(index, ["algorithms/policy/sac.py"], [])
    assert rules.indexed(index, [], ["sac.md"])


def test_every_page_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    queue = [DOCS / "index.md"]
    while queue:
        page = queue.pop().resolve()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        targets = [target.split("#")[0] for target in rules.LINK.findall(page.read_text(encoding="utf-8"))]
        queue += [page.parent / target for target in targets if target.endswith(".md") and "://" not in target]
    assert [str(page) for page in DOCS.rglob("*.md") if page.resolve() not in seen] == []


def preset_complaints(name: str, preset: dict[str, Any], fields: set[str]) -> list[str]:
    bad = [f"{name}: '{key}' is no field of Config" for key in preset if key not in fields | RUNTIME_KEYS]
    if len(str(preset.get("source", ""))) < 10:
        bad.append(f"{name}: does not say where its numbers come from")
    return bad


def test_presets_name_their_source_and_only_fields_that_exist() -> None:
    files = sorted((rules.PACKAGE / "presets").glob("*.yaml"))
    assert len(files) >= 2
    bad = []
    for file in files:
        fields = set(field_types(catalog.config_class(file.stem)))
        for name, preset in catalog.presets(file.stem).items():
            bad += preset_complaints(f"{file.name}: {name}", preset, fields)
    assert bad == []


def test_bad_presets_are_caught() -> None:
    good = {"env": "CartPole-v1", "gamma": 0.9, "source": "Table 3 of the paper"}
    assert preset_complaints("p", good, {"gamma"}) == []
    assert preset_complaints("p", good, {"discount"})
    assert preset_complaints("p", {**good, "source": ""}, {"gamma"})
    assert preset_complaints("p", {"gamma": 0.9}, {"gamma"})


def result_complaints(name: str, result: dict[str, Any]) -> list[str]:
    bad = [f"{name}: has no '{key}'" for key in sorted(RESULT_KEYS - set(result))]
    machine = result.get("machine", {})
    if not {"cores", "memory"} <= {key.split("_")[0] for key in machine} or {"host", "hostname", "node"} & set(machine):
        bad.append(f"{name}: machine must tell cores and memory, and no name")
    return bad


def test_results_tell_how_they_were_made() -> None:
    files = sorted((rules.ROOT / "results").glob("*.json"))
    bad = [line for f in files for line in result_complaints(f.name, json.loads(f.read_text(encoding="utf-8")))]
    assert bad == []


def test_bad_results_are_caught() -> None:
    good = {key: 1 for key in RESULT_KEYS} | {"machine": {"cores": 2, "memory_gib": 8}}
    assert result_complaints("r", good) == []
    assert result_complaints("r", {k: v for k, v in good.items() if k != "command"})
    assert result_complaints("r", good | {"machine": {"cores": 2, "memory": 8, "hostname": "x"}})
    assert result_complaints("r", good | {"machine": {"cores": 2}})


@functools.cache
def help_text(*words: str) -> str:
    """What `foresight WORDS --help` says; empty if it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        code = main([*words, "--help"])
    return said.getvalue() if code == 0 else ""


@functools.cache
def presets(algorithm: str) -> set[str]:
    """The names of its presets."""
    return set(catalog.presets(algorithm))


def command_complaints(line: str) -> list[str]:
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (rules.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return [f"{line}: no such target" for word in words[1:] if "=" not in word and word not in targets]
    if len(words) < 2 or words[1].startswith("-"):
        return []
    if not re.search(rf"\b{re.escape(words[1])}\b", help_text()):
        return [f"{line}: no such command"]
    bad, known = [], help_text(words[1])
    if words[1] == "train" and len(words) > 2 and words[2].startswith("examples/"):
        if not (rules.ROOT / words[2]).is_file():
            return [f"{line}: no such file"]
        known = help_text("train", str(rules.ROOT / words[2]))
    if words[1] in ("train", "show") and len(words) > 2 and words[2].isidentifier() and words[2].islower():
        if words[2] not in catalog.algorithms():
            return [f"{line}: no such algorithm"]
        if words[1] == "train":
            known = help_text("train", words[2])
        if "--preset" in words and words[words.index("--preset") + 1] not in presets(words[2]):
            bad.append(f"{line}: no such preset")
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return bad + [f"{line}: no such option {flag}" for flag in flags if not re.search(rf"{flag}\b", known)]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_commands_on_the_first_pages_exist(page: str) -> None:
    lines = rules.commands((rules.ROOT / page).read_text(encoding="utf-8"))
    assert len(lines) >= 3
    bad = [complaint for line in dict.fromkeys(lines) for complaint in command_complaints(line)]
    assert not bad, "\n" + "\n".join(bad)


def test_the_commands_of_all_pages_exist() -> None:
    pages = sorted(DOCS.rglob("*.md"))
    lines = dict.fromkeys(line for page in pages for line in rules.commands(page.read_text(encoding="utf-8")))
    assert len(lines) > 300
    bad = [complaint for line in lines for complaint in command_complaints(line)]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "line",
    [
        "make tea",
        "foresight brew",
        "foresight train ppoo --preset CartPole-v1",
        "foresight train ppo --preset CartPole-v9",
        "foresight train ppo --preset CartPole-v1 --sugar 2",
        "foresight list --sugar",
        "foresight train examples/tea.py --env CartPole-v1",
        "foresight train examples/ppo_kl_penalty.py --sugar 2",
    ],
)
def test_a_command_that_does_not_exist_is_caught(line: str) -> None:
    assert rules.commands(f"```bash\n{line}  # why\n```") == [line]
    assert rules.commands(f"Try it:\n\n    {line}    # why\n\n```python\n    {line}\n```\n") == [line]
    assert command_complaints(line)


def test_the_readme_lists_every_algorithm() -> None:
    assert [name for name in catalog.algorithms() if f"`{name}`" not in README] == []


def test_nothing_inherits_a_second_pygame() -> None:
    """Two packages own the module `pygame`; whichever is installed last wins, so only one may be named."""
    pinned = (rules.ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^pygame-ce==", pinned, re.MULTILINE)
    assert not re.search(r"^pygame==", pinned, re.MULTILINE)


def test_torch_is_pinned_without_a_build() -> None:
    pinned = (rules.ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==\d+\.\d+\.\d+$", pinned, re.MULTILINE)
    lines = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines)
