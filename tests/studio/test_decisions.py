"""Searches of runs in environments: an episode is the agent's own, and so is the search at each of its steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import foresight
from foresight.algorithms.search import muzero, sampled_muzero, stochastic_muzero
from foresight.errors import UserError
from foresight.runtime import environments, run
from foresight.studio import decisions, trees
from foresight.studio.runs import Library
from tests.algorithms.search.muzero_runs import SMALL, small

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("searching")
    shutil.copytree(FIXTURES / "ppo", found / "ppo")
    fields = {**SMALL, "steps": 120, "evaluation_episodes": 1, "show": False}
    foresight.train("muzero", env="CartPole-v1", out=found / "muzero", **fields)
    return found


@pytest.fixture(scope="module")
def searches(folder: Path) -> decisions.Decisions:
    return decisions.Decisions(Library([folder]))


def test_a_step_is_that_of_the_agents_episode(searches: decisions.Decisions, folder: Path) -> None:
    (player,) = searches.names()
    assert player["name"] == "muzero" and player["simulations"] == SMALL["simulations"]
    agent = run.load(folder / "muzero")
    obs, total = agent.env.reset(7), 0.0
    for _ in range(4):
        feedback = agent.env.step(agent.module.act(agent.state, obs)[0])
        obs, total = feedback.obs, total + float(feedback.reward[0])
    action, extras, _ = agent.module.act(agent.state, obs, simulations=9)
    agent.close()
    found = searches.look({"player": player["id"], "seed": 7, "step": 4, "simulations": 9})
    assert found["total"] == total and found["step"] == 4 and found["over"] is None
    analysis = found["analysis"]
    assert analysis["moves"][0]["action"] == int(action) and analysis["value"] == float(extras["value"][0])
    for row in analysis["moves"]:
        assert row["visits"] == int(extras["visits"][0, row["action"]])
        assert row["prior"] == float(extras["prior"][0, row["action"]])
    assert sum(row["visits"] for row in analysis["moves"]) == 9
    drawn = {child["action"]: child["visits"] for child in analysis["tree"]["children"]}
    assert drawn == {row["name"]: row["visits"] for row in analysis["moves"] if row["visits"]}
    again = {"player": player["id"], "seed": 7, "step": 200, "simulations": 1}
    end = searches.look(again)
    assert end["over"] and end["analysis"] is None and end["longest"] == end["step"] >= 5
    assert searches.look({"player": player["id"], "seed": 7, "step": 4, "simulations": 9}) == found


def test_a_fork_searches_by_what_it_does_not_by_its_name(folder: Path, tmp_path: Path) -> None:
    fork, run_of_it = tmp_path / "my_search.py", tmp_path / "runs" / "fork"
    fork.write_text(Path(str(muzero.__file__)).read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(folder / "muzero", run_of_it)
    config = (run_of_it / "config.yaml").read_text(encoding="utf-8")
    assert "algorithm: muzero\n" in config
    (run_of_it / "config.yaml").write_text(config.replace("algorithm: muzero\n", f"algorithm: {fork}\n"))
    found = decisions.Decisions(Library([tmp_path / "runs"]))
    (player,) = found.names()
    seen = found.look({"player": player["id"], "seed": 7, "step": 1, "simulations": 5})
    assert seen["game"] == player["game"] == "my_search on CartPole-v1" and seen["analysis"]["simulations"] == 5


@pytest.mark.parametrize(
    "module", [sampled_muzero, stochastic_muzero], ids=lambda module: module.__name__.split(".")[-1]
)
def test_actions_have_the_names_of_their_nodes(module: Any) -> None:
    """A sampled action is named by what it is, not by its number, and a chance outcome is no action."""
    _, env, state = small(module)
    spaces = env.spaces
    agent: Any = type("Agent", (), {"module": module, "state": state, "spaces": spaces})()
    obs = env.reset(0)[:1]
    found = decisions._analyze(agent, obs, 3, 40)
    _, extras = decisions._act(agent, obs, 3, 40)
    tree = extras["tree"]

    def walk(node: dict[str, Any], at: int, depth: int) -> Iterator[tuple[int, str, int, int]]:
        for child in node["children"]:
            (below,) = [
                int(i)
                for i in tree.children[0, at].tolist()
                if i >= 0 and names(at, int(tree.action[0, i])) == child["action"]
            ]
            yield depth, child["action"], int(tree.action[0, below]), at
            yield from walk(child, below, depth + 1)

    names = decisions._names(agent, tree)
    rows = list(walk(found["tree"], 0, 0))
    assert {depth for depth, *_ in rows} >= {0, 1}
    for depth, name, action, node in rows:
        if module is stochastic_muzero:
            assert name == (str(action) if depth % 2 == 0 else f"outcome {action - int(spaces.action.n)}")
        else:
            one = tree.state["actions"][node, 0, action]
            assert float(name) == pytest.approx(float(one) * 2, abs=0.006)  # Pendulum's actions are in [-2, 2]
    assert found["moves"][0]["visits"] == max(row["visits"] for row in found["moves"])
    assert trees.shown(tree, names) == found["tree"]


def test_environments_of_a_checkpoint_that_is_left_are_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[Any](), list[Any]()

    def opens(agent: Any) -> Any:
        opened.append(environments.single(agent.settings))
        return opened[-1]

    monkeypatch.setattr(decisions, "_rendering", opens)
    monkeypatch.setattr(decisions, "_close", closed.append)
    library = Library([folder])
    made = decisions.Decisions(library)
    (player,) = made.names()
    asked = {"player": player["id"], "step": 0, "simulations": 1}
    for seed in range(decisions.EPISODES + 1):
        made.look({**asked, "seed": seed})
    assert closed == opened[:1]  # one more than are kept
    monkeypatch.setattr(library, "saved", lambda name: "a newer checkpoint")
    made.look(asked)
    assert len(opened) == decisions.EPISODES + 2 and closed == opened[:-1]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "must be a name"),
        ({"player": "none"}, "no run"),
        ({"player": "muzero", "step": -1}, "step must be"),
        ({"player": "muzero", "simulations": 10**9}, "simulations must be"),
        ({"player": "muzero", "seed": 0.5}, "seed must be"),
        ({"player": "ppo"}, "does not search"),
    ],
)
def test_bad_requests_are_refused(searches: decisions.Decisions, folder: Path, document: dict, words: str) -> None:
    ids = {row["name"]: row["id"] for row in Library([folder]).table()}
    given = {**document, **({"player": ids.get(document["player"], "none")} if "player" in document else {})}
    with pytest.raises(UserError, match=words):
        searches.look(given)
