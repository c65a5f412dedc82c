from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.runtime.results import plot


def run(
    directory: Path,
    values: list[float],
    seed: int = 0,
    env: str = "CartPole-v1",
    steps: list[int] | None = None,
    algorithm: str = "ppo",
    metrics: tuple[str, ...] = ("return",),
) -> Path:
    directory.mkdir()
    rows = [
        {"step": step, "seconds": step / 10, **dict.fromkeys(metrics, value)}
        for step, value in zip(steps or range(1, len(values) + 1), values, strict=True)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "algorithm": algorithm,
        "env": env,
        "seed": seed,
        "baseline": {"metric": "return", "mean": 1.0, "std": 0.0, "n": 10},
        "evaluation": {"metric": "return", "mean": 9.0, "std": 0.5, "n": 10},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def slow_iqm(values: list[float]) -> float:
    """The mean of what is left when the lowest and the highest quarter are cut (whole runs only)."""
    cut = len(values) // 4
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 11])
def test_iqm_is_the_mean_of_the_middle(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(count, 3))
    expected = [slow_iqm(values[:, i].tolist()) for i in range(3)]
    np.testing.assert_allclose(plot.iqm(values), expected, rtol=1e-12)


def test_iqm_ignores_an_outlier() -> None:
    assert plot.iqm(np.array([[1.0], [2.0], [3.0], [4.0], [1e9]]))[0] == 3.0


def test_band_of_known_runs(tmp_path: Path) -> None:
    # Five seeds are flat at 1, 2, 3, 4 and 100: the interquartile mean is that of 2, 3 and 4.
    paths = [run(tmp_path / str(v), [v] * 10, seed=i) for i, v in enumerate([1.0, 2.0, 3.0, 4.0, 100.0])]
    (band,) = plot.bands(paths)
    assert band.label == "ppo on CartPole-v1" and band.runs == 5
    np.testing.assert_allclose(band.middle, 3.0)
    assert (band.low >= 1).all() and (band.low < 3).all() and (band.high > 3).all() and (band.high <= 100).all()


def test_an_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    low, high = plot.interval(rng.normal(size=(10, 400)), resamples=500)  # 400 experiments of 10 runs; the truth is 0
    covered = float(((low <= 0) & (high >= 0)).mean())
    assert 0.82 < covered < 0.98  # a percentile interval of 10 runs is a little narrow


def test_runs_that_agree_have_an_interval_of_one_point_and_one_run_has_none() -> None:
    low, high = plot.interval(np.full((4, 2), 7.0))
    assert low.tolist() == high.tolist() == [7.0, 7.0]
    assert np.isnan(plot.interval(np.ones((1, 3)))).all()


def test_nothing_is_extrapolated_beyond_the_shortest_run(tmp_path: Path) -> None:
    long = run(tmp_path / "a", [float(i) for i in range(1, 101)])
    short = run(tmp_path / "b", [float(i) for i in range(1, 51)], seed=1)
    (band,) = plot.bands([long, short])
    assert band.steps[-1] == 50 and band.middle[-1] == pytest.approx(50.0, abs=1.0)


def test_environments_are_plotted_apart(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", [1.0, 2.0]), run(tmp_path / "b", [3.0, 4.0], env="Acrobot-v1")]
    assert [band.label for band in plot.bands(paths)] == ["ppo on CartPole-v1", "ppo on Acrobot-v1"]


def test_a_fork_is_plotted_apart_from_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, other = str(tmp_path / "fork" / "ppo.py"), str(tmp_path.parent / "ppo.py")
    of = {"a": "ppo", "b": "ppo", "c": fork, "d": other, "e": str(tmp_path / "mine.py")}
    paths = [run(tmp_path / name, [1.0, 2.0], algorithm=algorithm) for name, algorithm in of.items()]
    monkeypatch.chdir(tmp_path)
    assert [(band.label, band.runs) for band in plot.bands(paths)] == [
        ("ppo on CartPole-v1", 2),
        (f"{Path('fork', 'ppo.py')} on CartPole-v1", 1),
        (f"{other} on CartPole-v1", 1),
        ("mine on CartPole-v1", 1),
    ]
    assert [band.label for band in plot.bands(paths[2:3])] == ["ppo on CartPole-v1"]  # alone, it has its own name


def test_runs_of_a_group_are_averaged_over_one_metric(tmp_path: Path) -> None:
    """The run that never logged a return once added its losses to the returns of the others."""
    shown = catalog.entry("ppo").metrics
    assert shown[0] == "return"
    both = run(tmp_path / "both", [1.0, 2.0], metrics=("return", shown[1]))
    less = run(tmp_path / "less", [3.0, 4.0], seed=1, metrics=(shown[1],))
    none = run(tmp_path / "none", [5.0, 6.0], seed=2)
    assert [band.metric for band in plot.bands([both, less])] == [shown[1]]
    assert [band.metric for band in plot.bands([both, none])] == ["return"]
    with pytest.raises(UserError) as caught:
        plot.bands([none, less])
    assert str(caught.value) == (
        f"The run '{less}' has not logged 'return', as others of ppo on CartPole-v1 have. "
        "Leave it out, or choose what all have logged with --metric."
    )


def test_runs_that_share_no_steps_have_no_mean(tmp_path: Path) -> None:
    early = run(tmp_path / "a", [1.0, 2.0], steps=[1, 10])
    late = run(tmp_path / "b", [3.0, 4.0], seed=1, steps=[11, 20])
    with pytest.raises(UserError, match="ppo on CartPole-v1 share no steps: one ends at 10, another begins at 11"):
        plot.bands([early, late])
    (band,) = plot.bands([early, run(tmp_path / "c", [4.0, 9.0], seed=2, steps=[10, 20])])
    assert band.steps.tolist() == [10] and band.middle.tolist() == [3.0]  # one shared step


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures_are_written(tmp_path: Path, suffix: str, magic: bytes) -> None:
    paths = [run(tmp_path / str(s), [float(s + i) for i in range(30)], seed=s) for s in range(3)]
    out = tmp_path / "deep" / f"curves{suffix}"
    plot.draw(paths, out)
    assert out.read_bytes().startswith(magic)
    plot.before_after(paths[0], tmp_path / f"one{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes().startswith(magic)


def test_before_and_after_are_named(tmp_path: Path) -> None:
    plot.before_after(run(tmp_path / "a", [1.0, 5.0, 9.0]), tmp_path / "one.svg")
    assert "before" in (text := (tmp_path / "one.svg").read_text()) and "after" in text


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    path = run(tmp_path / "a", [1.0, 2.0])
    with pytest.raises(UserError, match="not a run directory"):
        plot.draw([tmp_path], tmp_path / "x.png")
    with pytest.raises(UserError, match="Did you mean 'return'"):
        plot.draw([path], tmp_path / "x.png", metric="retrun")
    with pytest.raises(UserError, match="must end in"):
        plot.draw([path], tmp_path / "x.jpeg2")
    with pytest.raises(UserError, match="at least one"):
        plot.draw([], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.yaml", b"- 3\n"),
        ("config.yaml", b"env: caf\xe9\n"),
        ("config.yaml", b"{"),
        ("summary.json", b'{"steps": '),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, name: str, data: bytes) -> None:
    path = run(tmp_path / "a", [1.0, 2.0])
    (path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"(?s)a/{name} cannot be read: .* It was edited or is incomplete\.$"):
        plot.bands([path])


def test_a_value_without_a_place_on_the_axes_is_left_out(tmp_path: Path) -> None:
    own = run(tmp_path / "a", [1.0, 2.0])
    with (own / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 3, "seconds": 1, "return": {"9" * 400}}}\n{{"step": 4, "seconds": null, "return": 5}}\n')
    assert plot.curve(own, "return").values.tolist() == [1.0, 2.0, 5.0]
    assert plot.curve(own, "return", "seconds").values.tolist() == [1.0, 2.0]
