"""The interactive figures of the course compute what the library computes: their functions, run by Node."""

from __future__ import annotations

import functools
import json
import math
import random
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import td_prediction
from foresight.envs.games.make import make
from foresight.envs.tabular import grid, sutton_barto
from foresight.ops import policy
from foresight.planning.dynamic import bellman
from foresight.planning.search.mcts import PUCT, search
from foresight.planning.search.rules import Rules
from tests.house.rules import ROOT

MADE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "figures.py"))
FOLDER = ROOT / "docs" / "assets" / "figures"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on this system")
ALPHAS, WALKS = (0.02, 0.1, 0.5), (0, 17)


def answers(tmp_path: Path, script: str, given: Any, change: tuple[str, str] | None = None) -> Any:
    """What `script`, JavaScript that returns a value from `given`, returns. `change`: a mutation of the figures."""
    source = "\n".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in ("data", *MADE["PICTURES"]))
    if change:
        assert source.count(change[0]) == 1, change
        source = source.replace(*change)
    program = f"{source}\nconst given = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
    program += f"console.log(JSON.stringify(((given) => {{{script}}})(given)));"
    (tmp_path / "program.js").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [str(NODE), str(tmp_path / "program.js")], input=json.dumps(given), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- chapter 2


def grids(count: int) -> list[dict[str, Any]]:
    """Random grids of 25 cells, with values and a policy."""
    draw, found = random.Random(0), []
    while len(found) < count:
        cells = "".join(draw.choices("....##TG", k=24)) + "."
        found.append({
            "picture": [cells[r : r + 5] for r in range(0, 25, 5)], "slip": draw.choice([0, draw.random() / 2]),
            "step": -draw.random(), "gamma": draw.choice([0, 0.99, draw.random()]),
            "v": [draw.gauss(0, 1) for _ in cells],
            "policy": [draw.randrange(4) for _ in range(25)],
        })  # fmt: skip
    return found


def grid_faults(tmp_path: Path, change: tuple[str, str] | None = None) -> list[str]:
    """Where a sweep of the page differs from one of the library."""
    given = grids(60)
    script = """return given.map((one) => {
        const made = foresight.grid.model(one.picture, one.slip, one.step), {v, policy, gamma} = one;
        const {evaluate, improve, optimal} = foresight.grid;
        return {uniform: evaluate(made, v, null, gamma), evaluate: evaluate(made, v, policy, gamma),
            optimal: optimal(made, v, gamma), greedy: improve(made, v, null, gamma),
            improve: improve(made, v, policy, gamma)};
    });"""
    bad = []
    for number, (one, found) in enumerate(zip(given, answers(tmp_path, script, given, change), strict=True)):
        mdp = grid.gridworld(one["picture"], slip=one["slip"], step_reward=one["step"])
        assert mdp.layout is not None
        cells = torch.from_numpy(mdp.layout.position).long()
        sweeps = bellman.Sweeps(mdp, one["gamma"], compiled=False)
        v, chosen = torch.tensor(one["v"], dtype=torch.float64)[cells], torch.tensor(one["policy"])[cells]
        expected = {
            "uniform": sweeps.evaluate(v, mdp.uniform())[0],
            "evaluate": sweeps.evaluate(v, chosen)[0],
            "optimal": sweeps.improve(v, chosen)[0],
        }
        for name, values in expected.items():
            if not torch.allclose(torch.tensor(found[name], dtype=torch.float64)[cells], values, atol=1e-12):
                bad.append(f"{number}: {name}")
        going = ~mdp.absorbing()
        for name, keep in (("greedy", None), ("improve", chosen)):
            actions = bellman.greedy(mdp, one["gamma"], v, keep, slack=None if keep is not None else 0.0)[1]
            q = bellman.action_values(mdp, one["gamma"], v)
            there = torch.tensor(found[name])[cells]
            same = (q.gather(1, there[:, None]) - q.gather(1, actions[:, None])).abs().squeeze(1) < 1e-9
            if not (same if keep is None else same & (there == actions))[going].all():
                bad.append(f"{number}: {name}")
    return bad


@needs_node
def test_sweeps_of_the_grid_are_the_librarys(tmp_path: Path) -> None:
    assert grid_faults(tmp_path) == []
    assert grid_faults(tmp_path, ("gamma * going * v[next]", "gamma * v[next]")) != []
    assert grid_faults(tmp_path, ("[1, slip / 2], [-1, slip / 2]", "[1, slip], [-1, 0]")) != []
    assert grid_faults(tmp_path, (">= best - slack ? policy[s]", "> best ? policy[s]")) != []


@needs_node
def test_value_iteration_of_the_page_ends_at_the_librarys_values(tmp_path: Path) -> None:
    script = """const made = foresight.grid.model(given, 0.2, -0.04); let v = Array(25).fill(0);
        for (let i = 0; i < 300; i++) v = foresight.grid.optimal(made, v, 0.9);
        return [v, foresight.grid.improve(made, v, null, 0.9)];"""
    values, actions = answers(tmp_path, script, MADE["GRID"])
    still = (MADE["MEDIA"] / "grid.svg").read_text(encoding="utf-8")
    for cell, sign in enumerate("".join(MADE["GRID"])):
        if sign == ".":
            assert f">{values[cell]:.2f}<" in still and "↑→↓←"[actions[cell]] in still
    source = (FOLDER / "grid.js").read_text(encoding="utf-8")
    assert json.dumps(MADE["GRID"]) in source  # both start from the same grid


# --- chapter 3


@functools.cache
def walk_errors(n: int, alpha: float, seed: int) -> list[float]:
    """The library's error after each episode."""
    config = td_prediction.Config(**MADE["WALK"], n_steps=n, alpha=alpha, seed=seed, yield_every=0)
    env = sutton_barto.random_walk(5, 0.0, 1.0)
    return [metrics["rms_error"] for _, metrics, _ in td_prediction.train(config, env)]


def walk_faults(tmp_path: Path, change: tuple[str, str] | None = None) -> list[str]:
    """Where the error of the page differs from the library's, over the episodes of a run."""
    script = """const {episodes, td, monteCarlo, errors} = foresight.walk;
        const runs = foresight.data.walk.map(episodes);
        return given.map(([n, alpha, seed]) => errors(n === 1 ? td : monteCarlo, [runs[seed]], alpha));"""
    given = [(n, alpha, seed) for n in (1, 1024) for alpha in ALPHAS for seed in WALKS]
    bad = []
    for setting, found in zip(given, answers(tmp_path, script, given, change), strict=True):
        expected = walk_errors(*setting)
        if len(found) != 101 or max(abs(a - b) for a, b in zip(found[1:], expected, strict=True)) > 1e-12:
            bad.append(str(setting))
    return bad


@needs_node
def test_errors_of_the_random_walk_are_the_librarys(tmp_path: Path) -> None:
    assert walk_faults(tmp_path) == []
    assert walk_faults(tmp_path, ("(next === 6 ? 1 : 0) + (", "(next === 6 ? 1 : 0) + 0.9 * (")) != []
    assert walk_faults(tmp_path, ("alpha * (last - v[path[t]])", "alpha * (last - v[3])")) != []


# --- chapter 6


def clip_faults(tmp_path: Path, change: tuple[str, str] | None = None) -> list[str]:
    """Where the objective or its slope differs from the loss and its gradient."""
    draw = random.Random(0)
    given = [(draw.uniform(0, 2), draw.uniform(-2, 2), draw.uniform(0.01, 0.5)) for _ in range(300)]
    script = "return given.map((one) => [foresight.clip.objective(...one), foresight.clip.slope(...one)]);"
    bad = []
    for setting, (objective, slope) in zip(given, answers(tmp_path, script, given, change), strict=True):
        ratio = torch.tensor([setting[0]], dtype=torch.float64, requires_grad=True)
        loss = -policy.clipped_surrogate(ratio, torch.tensor([setting[1]], dtype=torch.float64), setting[2])
        loss.sum().backward()
        if abs(objective - float(loss.detach())) > 1e-12 or abs(slope - float(ratio.grad)) > 1e-12:
            bad.append(str(setting))
    return bad


@needs_node
def test_the_clipped_objective_is_the_librarys_loss(tmp_path: Path) -> None:
    assert clip_faults(tmp_path) == []
    assert clip_faults(tmp_path, ("ratio < 1 - epsilon);", "ratio > 1 + epsilon);")) != []


# --- chapter 8


def prefer_corners(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.zeros(len(positions), 9)
    logits[:, [0, 2, 6, 8]] = 3.0
    return logits, torch.zeros(len(positions))


def tree_faults(tmp_path: Path, change: tuple[str, str] | None = None) -> list[str]:
    """Where the tree of the page differs from the library's: nodes in the order of their simulations."""
    script = """return given.map(([game, corners, c, n]) =>
        foresight.puct.search(foresight.data.games[game], corners, c, n).tree.map((node) =>
            [node.parent, node.edge ? node.edge[0] : -1, node.visits, node.value]));"""
    given = [
        (name, corners, c, n)
        for name in MADE["GAMES"] for corners in (False, True)
        for c, n in ((0, 40), (0.3, 90), (1.25, 200), (4.95, 200))
    ]  # fmt: skip
    bad = []
    for setting, found in zip(given, answers(tmp_path, script, given, change), strict=True):
        name, corners, c, n = setting
        rule = PUCT(c_init=c, c_base=math.inf, normalize="none", first_play="zero")
        model = Rules(make("tic_tac_toe"), prefer_corners if corners else MADE["know_nothing"])
        tree = search(model, MADE["position"](MADE["GAMES"][name][1]), n, rule).tree
        used = [node for node in range(tree.size) if int(tree.visits[0, node])]  # a revisited end leaves its slot empty
        number = {node: i for i, node in enumerate(used)} | {-1: -1}
        expected = [
            [number[int(tree.parent[0, i])], int(tree.action[0, i]), int(tree.visits[0, i]), float(tree.value[0, i])]
            for i in used
        ]
        same = len(found) == len(expected) and all(
            a[:3] == b[:3] and abs(a[3] - b[3]) < 1e-6 for a, b in zip(found, expected, strict=True)
        )
        if not same:
            bad.append(str(setting))
    return bad


@needs_node
def test_the_search_tree_is_the_librarys(tmp_path: Path) -> None:
    assert tree_faults(tmp_path) == []
    assert tree_faults(tmp_path, ("Math.sqrt(node.visits) * c", "Math.sqrt(node.visits - 1) * c")) != []
    assert tree_faults(tmp_path, ("found = reward + discount * found", "found = reward + found")) != []


# --- files


def test_the_data_are_those_of_the_script() -> None:
    head = (FOLDER / "data.js").read_text(encoding="utf-8")
    assert len(head) < 100_000
    found = json.loads(head.partition("foresight.data = ")[2].rstrip("\n;"))
    assert len(found["walk"]) == MADE["RUNS"] and found["walk"][3] == MADE["walk"](3)
    for name, (title, moves) in MADE["GAMES"].items():
        assert found["games"][name] == {"title": title, **MADE["table"](moves)}


@pytest.mark.parametrize("name", ["grid", "clip", "tree"])
def test_the_still_pictures_are_those_of_the_script(name: str) -> None:
    text = (MADE["MEDIA"] / f"{name}.svg").read_text(encoding="utf-8")
    assert text == MADE["PICTURES"][name](), "run: python docs/figures.py"


def test_every_figure_of_the_course_has_its_script_and_a_still_picture() -> None:
    named = {
        name: page
        for page in (ROOT / "docs" / "learn").glob("*.md")
        for name in MADE["PICTURES"]
        if f'data-figure="{name}" markdown="1">\n\n![' in page.read_text(encoding="utf-8")
    }
    assert named.keys() == MADE["PICTURES"].keys()
    assert all((FOLDER / f"{name}.js").is_file() and (MADE["MEDIA"] / f"{name}.svg").is_file() for name in named)
