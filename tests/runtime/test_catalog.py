"""The catalog: quick, without torch, and true to the files."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foresight.cli import fields, library, train
from foresight.errors import UserError
from foresight.runtime import catalog, run, tune
from foresight.runtime.config import config_fields, resolve
from foresight.runtime.results import results
from foresight.training.options import flatten

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(catalog.algorithms())


def test_the_entries_are_those_of_the_modules() -> None:
    assert {"value_iteration", "ppo", "grpo"} <= set(NAMES)
    for name, entry in catalog.algorithms().items():
        module = catalog.module(name)
        assert (entry.kind, entry.unit, entry.metrics) == (module.KIND, module.UNIT, tuple(module.METRICS))
        assert entry.title and entry.doc.startswith(entry.title) and entry.path.name == f"{name}.py"
        assert entry.kind in ("control", "tabular", "game", "text", "images")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_without_torch_is_the_real_one(name: str) -> None:
    light, real = catalog.config_class(name), catalog.module(name).Config
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(light)] == [
        (f.name, f.type, f.default) for f in dataclasses.fields(real)
    ]
    assert inspect.getsource(light) == inspect.getsource(real)  # help texts are made from the source
    assert config_fields.fields(name, {}) == flatten(real())


def test_no_torch_for_names_and_fields() -> None:
    code = (
        "import sys\nfrom foresight.runtime import catalog, run\n"
        "from foresight.runtime.config import config_fields, resolve\n"
        "for name in catalog.algorithms():\n    config_fields.fields(name, {}); catalog.presets(name)\n"
        "heavy = {'torch', 'gymnasium', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_fits_its_algorithm_and_names_its_source(name: str) -> None:
    for preset, values in catalog.presets(name).items():
        resolved = resolve.resolve(name, preset=preset)
        assert resolved.env and values.get("source"), f"{name}: {preset}"


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="Did you mean 'value_iteration'"):
        catalog.entry("value_iterations")
    with pytest.raises(UserError, match="is not an algorithm file"):
        catalog.entry(str(Path(__file__)))


SOURCE = '''"""Own: does nothing."""
from dataclasses import dataclass
KIND = "control"
METRICS = ("return",)

@dataclass(frozen=True)
class Config:
    steps: int = 3  # env steps
'''
PARTS = "\nbuild = act = train = lambda *args: None\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SOURCE.replace('"control"', '"control'), "own.py, line 3: unterminated string literal"),
        (SOURCE + "\ndef act(:\n", "own.py, line 10: invalid syntax"),
        (SOURCE.replace('("return",)', 'OWN + ("return",)'), "own.py, line 4: METRICS must be written out"),
        (
            SOURCE.replace('("return",)', "5"),
            "METRICS must be written out, since the file is read without running it, as",
        ),
        (SOURCE.replace('"control"', '["control"]'), 'as in KIND = "control".'),
        (SOURCE.replace("nothing", "caf\udce9"), "own.py cannot be read: 'utf-8' codec can't decode"),
        (SOURCE + "\0", "own.py"),  # the rest differs by the version of Python
    ],
)
def test_a_mistake_in_an_own_file_is_named_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(source, errors="surrogateescape")
    for read in (lambda: (catalog.entry(str(own)), catalog.config_class(str(own))), lambda: catalog.module(str(own))):
        with pytest.raises(UserError) as caught:
            read()
        assert message in str(caught.value)


@pytest.mark.parametrize("missing", [["act"], ["train"], ["build", "act"]])
def test_an_own_file_without_its_functions_is_refused_before_training(tmp_path: Path, missing: list[str]) -> None:
    own = tmp_path / "partial.py"
    own.write_text(catalog.entry("q_learning").path.read_text(encoding="utf-8"), encoding="utf-8")
    for name in missing:
        own.write_text(own.read_text(encoding="utf-8").replace(f"def {name}(", f"def own_{name}("), encoding="utf-8")
    for _ in range(2):  # it is not remembered as one that was loaded
        with pytest.raises(UserError, match=rf"partial\.py has no function {', '.join(missing)}\. "):
            run.train(str(own), env="GridWorld4x4", out=tmp_path / "out", show=False, steps=100)
        assert not (tmp_path / "out").exists()


def _own(path: Path, edit: Callable[[str], str] = lambda source: source) -> Path:
    path.write_text(edit(catalog.entry("q_learning").path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def _gamma(path: Path, out: Path) -> float:
    return float(run.train(str(path), env="GridWorld4x4", out=out, show=False, steps=100).settings.config["gamma"])


def test_an_own_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    """Between two trainings, not within one; and an error in it is forgotten when it is fixed."""
    own = _own(tmp_path / "edited.py")
    before = _gamma(own, tmp_path / "a")
    module = catalog.module(str(own))
    _own(own, lambda source: re.sub(r"gamma: float = [\d.]+", "gamma: float = 0.625", source))
    assert catalog.module(str(own)) is module and catalog.config_class(str(own))().gamma == before
    assert _gamma(own, tmp_path / "b") == 0.625 != before
    own.write_text("oh no")
    with pytest.raises(UserError, match=r"edited\.py, line 1: "):
        run.train(str(own), env="GridWorld4x4", out=tmp_path / "c", show=False, steps=100)
    _own(own, lambda source: source.replace("import torch\n", "import torch\nunknown\n"))
    for _ in range(2):
        with pytest.raises(NameError, match="unknown"):
            run.train(str(own), env="GridWorld4x4", out=tmp_path / "c", show=False, steps=100)
    assert _gamma(_own(own), tmp_path / "c") == before


def test_an_own_file_imports_what_is_beside_it_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("GAMMA = 0.375")
    own = _own(
        tmp_path / "importing.py", lambda source: source.replace("import torch\n", "import torch\nimport beside_it\n")
    )
    assert catalog.module(str(own)).beside_it.GAMMA == 0.375


def test_what_is_beside_an_own_file_is_neither_anothers_nor_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    own, imports = {}, "\nimport shared_name\nimport shared_package\n"
    for name in ("here", "one", "two"):
        (tmp_path / name / "shared_package").mkdir(parents=True)
        (tmp_path / name / "shared_name.py").write_text(f"folder = {name!r}")
        (tmp_path / name / "shared_package" / "__init__.py").write_text("from shared_package.part import folder")
        (tmp_path / name / "shared_package" / "part.py").write_text(f"folder = {name!r}")
        own[name] = _own(tmp_path / name / f"of_{name}.py", lambda source: source + imports)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("shared_name", "shared_package"):
        importlib.import_module(name)
    before = [str(tmp_path / "two"), *sys.path]
    monkeypatch.setattr(sys, "path", list(before))
    for name in ("one", "two", "one"):
        found = catalog.module(str(own[name]))
        assert found.shared_name.folder == found.shared_package.folder == name
    assert sys.path == [*before, str(tmp_path / "one")]  # the caller's order stays
    for name in ("shared_name", "shared_package.part", "shared_package"):
        del sys.modules[name]


def test_the_name_of_an_own_file_means_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither old names of fields, nor results, a page, search ranges or idle fields are those of the library's SAC."""
    added = "class Config:\n    alpha: float = 0.5  # of this file\n    max_lag: int = 1  # of it, too\n"
    own = _own(tmp_path / "sac.py", lambda source: source.replace("class Config:\n", added))
    trained = run.train(own, env="GridWorld4x4", out=tmp_path / "run", show=False, steps=100, alpha=0.25, max_lag=3)
    config = trained.settings.config
    assert (config["alpha"], config["max_lag"]) == (0.25, 3)
    assert train.parse(str(own), ["--alpha", "0.125"])[1] == {"alpha": 0.125}
    learner = tmp_path / "ppo.py"
    learner.write_text(catalog.entry("reinforce").path.read_text(encoding="utf-8"), encoding="utf-8")
    assert "learning_rate" in tune.search_space(str(learner), config_fields.fields(str(learner), {}))
    assert library._verified(catalog.entry(str(own)), results.rows()) == []
    assert library._verified(catalog.entry("sac"), results.rows())
    printed: list[dict[str, object]] = []
    monkeypatch.setattr("foresight.cli.screen.emit", printed.append)
    library.show(str(own), json=True)
    library.show("sac", json=True)
    assert printed[0]["docs"] is None and str(printed[1]["docs"]).endswith("sac.md")


def test_options_of_every_run_are_no_fields(tmp_path: Path) -> None:
    typed = {field.name for field in dataclasses.fields(train.Options)}
    called = set(inspect.signature(run.train).parameters) - {"fields", "model", "seed", "steps"}
    assert set(catalog.OPTIONS) == typed | called
    for name in catalog.algorithms():
        assert not set(catalog.OPTIONS) & set(config_fields.fields(name, {})), name


CLASS = "@dataclass(frozen=True)\nclass Config:\n"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (CLASS + "    keep: float = 0.5\n", r"odd\.py: 'keep' is an option of every run\. Give the field"),
        (CLASS + "    half: int = field(init=False, default=2)\n", r"'half' of Config has init=False\. Make it a prop"),
        (CLASS.splitlines(keepends=True)[1], r"Config is no dataclass\. Write @dataclass\(frozen=True\) above it"),
    ],
)
def test_a_config_that_no_run_can_have_is_refused(tmp_path: Path, written: str, message: str) -> None:
    imported = "from dataclasses import dataclass"
    own = _own(
        tmp_path / "odd.py",
        lambda source: source.replace(CLASS, written).replace(imported, f"{imported}, field"),
    )
    with pytest.raises(UserError, match=message):
        catalog.config_class(str(own))


def test_fields_may_be_in_a_dataclass_that_a_factory_makes(tmp_path: Path) -> None:
    inner = "@dataclass(frozen=True)\nclass Inner:\n    width: int = 4  # of nothing\n\n\n"
    made = CLASS + "    inner: Inner = field(default_factory=Inner)  # two names\n"
    imported = "from dataclasses import dataclass"
    own = _own(
        tmp_path / "nested.py",
        lambda source: source.replace(CLASS, inner + made).replace(imported, f"{imported}, field"),
    )
    trained = run.train(own, env="GridWorld4x4", out=tmp_path / "run", show=False, steps=100, width=6)
    assert trained.settings.config["width"] == 6 and trained.load().config.inner.width == 6


def test_an_edited_config_decides_when_a_run_is_resumed(tmp_path: Path) -> None:
    added = "class Config:\n    extra: int = 1  # of this file\n"
    own = _own(tmp_path / "changing.py", lambda source: source.replace("class Config:\n", added))
    run.train(own, env="GridWorld4x4", out=tmp_path / "run", show=False, steps=100)
    _own(own)
    with pytest.raises(UserError, match="Unknown field of changing 'extra'"):
        run.resume(tmp_path / "run", 200, show=False)
    _own(own, lambda source: source.replace("class Config:\n", f"{added}    more: int = 7  # of it, too\n"))
    config = run.resume(tmp_path / "run", 200, show=False).load().config
    assert (config.extra, config.more) == (1, 7)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("place: Path = Path('a')", r"The field 'place' of Config is 'a', a PosixPath\. It must be a string"),
        ("kept: frozenset[int] = frozenset({1})", r"The field 'kept' of Config is 'frozenset\(\{1\}\)', a frozenset"),
    ],
)
def test_a_field_that_cannot_be_written_is_named_before_training(tmp_path: Path, field: str, message: str) -> None:
    own = _own(
        tmp_path / "fields.py",
        lambda source: source.replace("import torch\n", "import torch\nfrom pathlib import Path\n").replace(
            "class Config:\n", f"class Config:\n    {field}  # a value\n"
        ),
    )
    with pytest.raises(UserError, match=message):
        run.train(str(own), env="GridWorld4x4", out=tmp_path / "out", show=False, steps=100)
    assert not (tmp_path / "out").exists()


def test_types_of_fields_may_have_other_names(tmp_path: Path) -> None:
    own = tmp_path / "aliases.py"
    alias = SOURCE.replace("from dataclasses", "from __future__ import annotations\nfrom dataclasses")
    alias = alias.replace("@dataclass", "Floats = tuple[float, ...]\n\n@dataclass")
    own.write_text(alias + "    rates: Floats = (0.5,)  # of learning\n" + PARTS)
    assert config_fields.coerce(str(own), {"rates": [1, 2]}) == {"rates": (1.0, 2.0)}


def test_an_own_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    own = tmp_path / "marked.py"
    own.write_text(SOURCE + PARTS, encoding="utf-8-sig")
    assert catalog.entry(str(own)).title == "Own: does nothing." and catalog.module(str(own)).KIND == "control"
    assert [field.help for field in fields.describe(catalog.config_class(str(own)), own)] == ["env steps"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CartPole-v1: {env: CartPole-v1", "expected ',' or '}'"),
        ("- CartPole-v1", "it holds a list, not names and values"),
        ("CartPole-v1:", "'CartPole-v1' is None, not names and values"),
        ("env: CartPole-v1", "'env' is 'CartPole-v1', not names and values"),
        ("a: {env: 3}", "env of 'a' is 3"),
        ("a: {env: CartPole-v1, evaluation: 5}", "evaluation of 'a' is 5"),
        ("a: {env: CartPole-v1, evaluation: {every: x}}", "every of the evaluation of 'a' is 'x'"),
        ("a: {env: CartPole-v1, env_options: [size]}", "env_options of 'a' is ['size']"),
    ],
)
def test_malformed_presets_of_an_own_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        resolve.resolve(str(tmp_path / "own.py"), env="CartPole-v1")
    assert message in str(caught.value) and "own.yaml cannot be read" in str(caught.value)


def test_a_config_that_needs_its_module_is_imported_for_real(tmp_path: Path) -> None:
    own = tmp_path / "needy.py"
    own.write_text(
        '"""NEEDY: needs a function for its defaults."""\nfrom __future__ import annotations\n'
        'from dataclasses import dataclass\nKIND = "text"\n\ndef half(x: int) -> int:\n    return x // 2\n\n'
        "@dataclass(frozen=True)\nclass Config:\n    steps: int = half(8)\n" + PARTS
    )
    assert catalog.config_class(str(own))().steps == 4


def test_a_relative_name_in_another_directory_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, steps in (("a", "1"), ("b", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(SOURCE.replace("= 3", f"= {steps}"))
        monkeypatch.chdir(tmp_path / folder)
        assert catalog.config_class("own.py")().steps == int(steps)


def test_a_preset_whose_environment_is_left_empty_has_none(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(SOURCE)
    own.with_suffix(".yaml").write_text("CartPole-v1: {env: , steps: 5}")
    assert resolve.resolve(str(own), env="CartPole-v1").config["steps"] == 5
