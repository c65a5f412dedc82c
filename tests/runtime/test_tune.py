"""The search for hyperparameters: what it compares, that it resumes, and what it leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from foresight.errors import BusyError, UserError
from foresight.runtime import lock, run
from foresight.runtime.config import config_fields

optuna = pytest.importorskip("optuna")

from foresight.runtime import tune  # noqa: E402


@pytest.fixture
def ranges(tmp_path: Path) -> Path:
    """Learning rates that say how good they are: see `_train`."""
    file = tmp_path / "ranges.yaml"
    file.write_text("learning_rate: {low: 0.1, high: 0.9}\nhidden: [[8], [16, 16]]\n")
    return file


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs that reach their learning rate at once."""
    calls: list[dict[str, Any]] = []

    def train(name: str, *, callbacks: Any, out: Path, **given: Any) -> Any:
        calls.append(given)
        if given["learning_rate"] > 0.85:
            raise UserError("the loss became NaN")
        for step in range(1, 5):
            for callback in callbacks:
                callback(step, {"return": given["learning_rate"]}, None)
        from foresight.runtime.evaluation.evaluate import Evaluation

        return type("Run", (), {"evaluation": Evaluation.of("return", [given["learning_rate"]])})

    monkeypatch.setattr(run, "train", train)
    return calls


def _tune(tmp_path: Path, ranges: Path, trials: int, **options: Any) -> tune.TuneResult:
    return tune.tune("ppo", env="CartPole-v1", trials=trials, out=tmp_path / "search", ranges=ranges, **options)


def test_it_finds_the_best_and_resumes(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    first = _tune(tmp_path, ranges, 4, steps=1000)
    assert first.trials == len(trained) == 4
    good = [call["learning_rate"] for call in trained if call["learning_rate"] <= 0.85]
    assert first.value == max(good) == first.fields["learning_rate"]
    assert first.fields["hidden"] in ([8], [16, 16])
    second = _tune(tmp_path, ranges, 6, steps=1000)
    assert second.trials == len(trained) == 6  # two more
    assert second.value >= first.value
    assert len({call["learning_rate"] for call in trained}) == 6  # a resumed trial does not restart
    assert _tune(tmp_path, ranges, 6, steps=1000).fields == second.fields and len(trained) == 6
    assert {call["steps"] for call in trained} == {1000} and {call["seed"] for call in trained} == {0}


def test_any_folder_holds_a_search(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in Path("lr?gamma=1"), tmp_path / "100% {best} #1?":
        for count in (1, 2):
            tune.tune("ppo", env="CartPole-v1", trials=count, out=out, ranges=ranges)
        assert (out / tune.STUDY).is_file()
    assert len(trained) == 4 and not (tmp_path / "lr").exists()


def test_budgets_are_not_mixed(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    """A return after 1,000 steps is not comparable with one after 2,000; those of the preset are a budget too."""
    _tune(tmp_path, ranges, 2, steps=1000)
    for other, count in ({"steps": 2000}, "2,000"), ({}, "100,000"):
        with pytest.raises(UserError) as caught:
            _tune(tmp_path, ranges, 3, **other)
        assert str(caught.value) == (
            f"The trials in {tmp_path / 'search'} have 1,000 steps each, and those of {count} cannot be compared with "
            "them. Continue with --steps 1000, or start another search with --out."
        )
    assert len(trained) == 2
    assert _tune(tmp_path, ranges, 3, steps=1000).trials == 3


def test_trials_share_one_seed_which_is_in_the_command(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]
) -> None:
    found = _tune(tmp_path, ranges, 2, seed=7)
    assert {call["seed"] for call in trained} == {7} and found.command.endswith("--seed 7")
    with pytest.raises(UserError, match="have the seed 7, and those of 0 cannot be compared with them"):
        _tune(tmp_path, ranges, 3)


def test_the_best_trial_may_have_searched_other_fields(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]
) -> None:
    _tune(tmp_path, ranges, 3)
    ranges.write_text("learning_rate: {low: 0.01, high: 0.02}\n")
    found = _tune(tmp_path, ranges, 5)
    ((_, preset),) = yaml.safe_load((found.path / tune.BEST).read_text()).items()
    assert found.fields["hidden"] in ([8], [16, 16]) and found.trials == 5
    assert config_fields.fields("ppo", preset)["hidden"] == tuple(found.fields["hidden"])


def test_a_killed_trial_counts_in_the_total(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    found = _tune(tmp_path, ranges, 1)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{found.path / tune.STUDY}")
    study.ask()  # is running when the process is killed
    assert _tune(tmp_path, ranges, 3).trials == 3 and len(trained) == 2


def test_choices_are_not_changed_in_a_search(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    _tune(tmp_path, ranges, 1)
    text = ranges.read_text()
    ranges.write_text(text.replace("[8], [16, 16]", "[8], [32]"))
    with pytest.raises(UserError, match=r"another range of 'hidden' \(\[\[8\], \[16, 16\]\]\).*--out"):
        _tune(tmp_path, ranges, 2)
    ranges.write_text(text.replace("0.1, high", "0.2, high"))  # a narrower range may follow
    assert len(trained) == 1 and _tune(tmp_path, ranges, 2).trials == 2


def test_of_errors_less_is_better(tmp_path: Path, ranges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foresight.runtime.evaluation.evaluate import Evaluation

    rates: list[float] = []

    def train(name: str, *, learning_rate: float, **given: Any) -> Any:
        rates.append(learning_rate)
        return type("Run", (), {"evaluation": Evaluation.of("rms_error", [learning_rate])})

    monkeypatch.setattr(run, "train", train)
    found = _tune(tmp_path, ranges, 5)
    assert found.value == min(rates) == found.fields["learning_rate"] < max(rates)


def test_it_writes_a_preset_that_can_be_used(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    found = _tune(tmp_path, ranges, 2)
    ((name, preset),) = yaml.safe_load((found.path / tune.BEST).read_text()).items()
    assert name == "CartPole-v1-tuned" and preset["env"] == "CartPole-v1"
    assert preset["learning_rate"] == found.value and preset["hidden"] == found.fields["hidden"]
    assert config_fields.fields("ppo", preset)["hidden"] == tuple(found.fields["hidden"])
    assert found.command.startswith("foresight train ppo --preset CartPole-v1 ")
    assert f"--learning-rate {found.value}" in found.command


def test_bad_trials_are_stopped_early(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "WARM_UP", 2)
    found = _tune(tmp_path, ranges, 8, steps=4)
    assert " --steps 4 " in found.command
    good = [call for call in trained if call["learning_rate"] <= 0.85]
    assert found.trials == 8 and 2 <= found.complete < len(good)


def test_a_search_in_which_every_trial_fails_reports_why(tmp_path: Path, trained: list[dict[str, Any]]) -> None:
    file = tmp_path / "ranges.yaml"
    file.write_text("learning_rate: {low: 0.9, high: 0.99}\n")
    with pytest.raises(UserError, match=r"None of 1 trials succeeded.*became NaN"):
        _tune(tmp_path, file, 1)


def test_one_process_searches_in_a_directory(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    _tune(tmp_path, ranges, 1)
    with lock.held(tmp_path / "search"), pytest.raises(BusyError, match="another process"):
        _tune(tmp_path, ranges, 2)
    assert len(trained) == 1 and _tune(tmp_path, ranges, 2).trials == 2


def test_a_directory_holds_one_search(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    _tune(tmp_path, ranges, 1)
    with pytest.raises(UserError) as caught:
        tune.tune("ppo", env="Acrobot-v1", trials=2, out=tmp_path / "search", ranges=ranges)
    assert str(caught.value) == (
        f"{tmp_path / 'search'} holds the search tune-ppo-CartPole-v1, and this one is tune-ppo-Acrobot-v1. "
        "Choose another --out."
    )
    assert len(trained) == 1


def test_a_preset_has_its_own_environment(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    """The folder and the command name the preset alone, so that two environments would share one search."""
    with pytest.raises(UserError, match=r"a preset \('CartPole-v1'\) or an environment \('Acrobot-v1'\), not both"):
        tune.tune("ppo", preset="CartPole-v1", env="Acrobot-v1", trials=1, out=tmp_path / "search", ranges=ranges)
    assert not trained and not (tmp_path / "search").exists()


def test_a_search_that_is_stopped_tells_how_to_continue_it(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foresight.runtime.session import Interrupted

    def stopped(name: str, *, out: Path, **given: Any) -> Any:
        raise Interrupted(out, 100, "env steps", signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as caught:
        patch.setattr(run, "train", stopped)
        _tune(tmp_path, ranges, 2)
    assert "Continue the search with the same command." in str(caught.value) and "resume" not in str(caught.value)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert _tune(tmp_path, ranges, 2).trials == 2 and len(trained) == 1


def test_ranges_from_the_fields_themselves() -> None:
    config = {**config_fields.fields("impala", {}), "learning_rate": 1e-3}
    guessed = {name: tune._guess(name, value, type(value)) for name, value in config.items()}
    assert guessed["learning_rate"] == tune.Range(1e-4, 1e-2, log=True)
    assert guessed["num_envs"] == tune.Range(choices=(2, 4, 8, 16, 32))
    assert guessed["gamma"] == tune.Range(choices=tuple(tune.CHOICES["gamma"]))
    assert tune._guess("hidden", 64, int) is None  # of pretrain, which has one number there
    assert guessed["seed"] is guessed["steps"] is guessed["threads"] is None
    searched = tune.search_space("dreamer", config_fields.fields("dreamer", {}))
    assert "dynamics_coef" in searched and "redundancy_coef" not in searched  # that is for a model without a decoder


def test_a_field_that_defines_the_score_is_not_searched(tmp_path: Path) -> None:
    """The value of a policy is larger with a larger gamma, whatever was learned."""
    config = config_fields.fields("soft_value_iteration", {})
    assert list(tune.search_space("soft_value_iteration", config)) == ["entropy_temperature"]
    with pytest.raises(UserError, match="q_learning has no default ranges"):
        tune.search_space("q_learning", config_fields.fields("q_learning", {}))
    file = tmp_path / "ranges.yaml"
    file.write_text("alpha: [0.1, 0.5]\ngamma: [0.9, 0.99]\n")
    for given in {"ranges": file}, {"only": ["gamma"]}:
        with pytest.raises(UserError, match="'gamma' is not searched: each run of q_learning is scored with its own"):
            tune.search_space("q_learning", config_fields.fields("q_learning", {}), **given)


def test_a_trial_is_without_fields_that_it_turns_off(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]
) -> None:
    ranges.write_text("learning_rate: [0.5]\nmemory: [null, gru]\nmemory_size: [32]\n")
    found = _tune(tmp_path, ranges, 8)
    assert {(call["memory"], call.get("memory_size")) for call in trained} == {(None, None), ("gru", 32)}
    assert ("memory_size" in found.fields) == (found.fields["memory"] == "gru") == ("--memory-size" in found.command)


@pytest.mark.parametrize("name", [file.stem for file in (tune.catalog.ROOT / "presets" / "ranges").glob("*.yaml")])
def test_the_bundled_ranges_fit_their_algorithms(name: str) -> None:
    assert len(tune.search_space(name, config_fields.fields(name, {}))) > 3


MISTAKES = [
    ({"trials": 0}, "", "--trials must be at least 1"),
    ({"only": ["learning_rat"]}, "gamma: [0.9]", "Did you mean 'learning_rate'"),
    ({"only": ["learning_rate"]}, "gamma: [0.9]", "no default range for 'learning_rate'"),
    ({}, "seed: [1, 2]", "'seed' is not searched: all trials share --seed"),
    ({}, "steps: [100, 200]", "'steps' is not searched: all trials share --steps"),
    ({"only": ["seed"]}, "gamma: [0.9]", "'seed' is not searched"),
    ({}, "gama: [0.9]", "Did you mean 'gamma'"),
    ({}, "gamma: 0.9", "range of 'gamma' must be a list, or low, high"),
    ({}, "gamma: {low: 0.9, high: 0.1}", "low below high"),
    ({}, "learning_rate: {low: 0, high: 0.1, log: true}", "range of 'learning_rate'"),
    ({}, "gamma: [high]", "must be float"),
    ({}, "{}", "has no default ranges"),
    ({}, "gamma: {low: 0.9", r"ranges\.yaml cannot be read: .*Write a field and its range"),
    ({}, "- gamma", "cannot be read: it holds a list, not names and values"),
    ({}, "gamma: [caf\udce9]", "cannot be read: 'utf-8' codec"),
    ({}, "1: [0.9]", "Unknown field of ppo '1'"),
    ({}, "gamma: {low: null, high: 0.9}", "must be float, not None"),
    ({}, "clip_value: {low: null, high: 0.9}", "range of 'clip_value' must be"),
    ({}, "gamma: {low: 0.9, high: .inf}", "range of 'gamma' must be"),
    ({}, "hidden: {low: [8], high: [16]}", "range of 'hidden' must be"),
]


@pytest.mark.parametrize(("options", "text", "message"), MISTAKES)
def test_mistakes_are_reported_with_what_to_do(
    tmp_path: Path, options: dict[str, Any], text: str, message: str
) -> None:
    file = tmp_path / "ranges.yaml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=f"(?s){message}"):
        _tune(tmp_path, file, **{"trials": 1, **options})


def test_a_damaged_search_is_reported(tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]) -> None:
    _tune(tmp_path, ranges, 1)
    study = tmp_path / "search" / tune.STUDY
    whole = study.read_bytes()
    for damage in (b"no database", whole[: len(whole) // 2]):
        study.write_bytes(damage)
        with pytest.raises(UserError, match=r"study.db cannot be used: .*start another search with --out"):
            _tune(tmp_path, ranges, 2)
    study.unlink()
    study.mkdir()
    with pytest.raises(UserError, match=r"study.db cannot be used: unable to open"):
        _tune(tmp_path, ranges, 2)


def test_the_best_that_cannot_be_written_is_reported(
    tmp_path: Path, ranges: Path, trained: list[dict[str, Any]]
) -> None:
    (tmp_path / "search" / tune.BEST).mkdir(parents=True)
    with pytest.raises(UserError, match=r"Cannot write .*best.yaml: .*The trials are kept"):
        _tune(tmp_path, ranges, 1)
