"""The stack: scripted layers do all errands, reports lead to new plans, clocks tick, and nothing goes below control."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foresight.agents import stack
from foresight.agents.stack import Chunk, Episode, Report, Stack, Subgoal
from foresight.algorithms.world import tdmpc2
from foresight.envs.control.errands import script
from foresight.envs.control.errands.points import Points
from foresight.envs.control.errands.rules import SPLITS, Errand
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.planning.generation import rollout
from tests.sabotage import sabotaged_by

SCRIPTS = {kind: layers["script"] for kind, layers in stack.LAYERS.items()}


def succeed(one: Stack, errands: list[Errand]) -> list[Episode]:
    episodes = stack.run(one, errands)
    failed = [episode.errand.instruction for episode in episodes if not episode.errand.success]
    assert not failed
    return episodes


@sabotaged_by("foresight.envs.control.errands.script._free_beside", lambda f: lambda errand, cell: (1, 1))
@sabotaged_by("foresight.envs.control.errands.script._behind", lambda f: lambda errand, door, here: (0.5, 0.5))
def test_scripted_layers_do_every_errand() -> None:
    episodes = succeed(Stack(**SCRIPTS), [Errand(seed, split) for split in SPLITS for seed in range(15)])
    assert any(line["text"].startswith("failed: the") for one in episodes for line in one.log)  # locked doors


def _deaf(cognition):
    """Cognition that plans as at the beginning, whatever is reported."""
    return lambda words, reports: cognition(words, [Report("begins", "it begins") for _ in reports])


@sabotaged_by("foresight.agents.stack.scripted_cognition", _deaf)
@sabotaged_by("foresight.agents.stack.report", lambda f: lambda one: None)
def test_it_recovers_from_locked_doors_and_objects_that_slip() -> None:
    errands = [one for one in (Errand(seed, failures=0.3) for seed in range(40)) if one.lock is not None][:12]
    layers = {**SCRIPTS, "cognition": stack.scripted_cognition}
    episodes = succeed(Stack(**layers), errands)
    assert any("slipped" in line["text"] for one in episodes for line in one.log)
    for one in episodes:  # what was reported is what the next plan is for
        for told, plan in zip(one.log, one.log[1:], strict=False):
            if told["text"].endswith("door is locked"):
                color = told["text"].split()[2]
                assert plan["layer"] == "cognition" and f"open the {color} door" in plan["text"]


def test_each_layer_has_a_clock_of_its_own() -> None:
    calls: dict[str, list[int]] = {"cognition": [], "semantic": [], "control": []}
    errand = Errand(1)

    def counted(kind):
        def call(*args):
            calls[kind].append(errand.time)
            return SCRIPTS[kind](*args)

        return call

    stack.run(Stack(**{kind: counted(kind) for kind in calls}, think_every=12, look_every=4), [errand])
    assert errand.success and calls["control"] == list(range(errand.time))
    assert all(t % 12 == 0 for t in calls["cognition"]) and all(t % 4 == 0 for t in calls["semantic"])
    assert len(calls["cognition"]) < len(calls["semantic"]) < len(calls["control"])
    with pytest.raises(UserError, match="look_every is 0"):
        Stack(**SCRIPTS, look_every=0)


def test_control_is_kept_within_its_limits() -> None:
    wild = torch.tensor([[float("nan"), 9.0], [float("inf"), -0.5]])
    assert stack.safe(wild).tolist() == [[0.0, 1.0], [0.0, -0.5]]
    errand = Errand(0)
    errand.place, errand.velocity = [0.25, 0.25], [0.04, 0.0]
    episode = Episode(errand, [Subgoal("drop it")], Chunk((0.9, 0.25), script.OPEN, 0))
    one = Stack(**SCRIPTS, stale=3)
    for _ in range(3):
        stack.move(one, [episode], None)
    assert errand.velocity[0] > 0.04  # toward the point
    for _ in range(6):
        stack.move(one, [episode], None)
    assert abs(errand.velocity[0]) < 0.01  # the chunk is stale


@sabotaged_by("foresight.data.trees.pick", lambda f: lambda tree, rows: tree[: len(rows)])
def test_the_carry_of_control_stays_with_its_errand() -> None:
    errands = [Errand(seed) for seed in (4, 5, 6)]
    lengths = set()

    def control(offset, velocity, carry):
        carry = torch.arange(len(offset)) if carry is None else carry
        lengths.add(len(carry))
        assert carry.tolist() == [i for i, one in enumerate(errands) if not one.over]
        return stack.scripted_control(offset, velocity, carry)

    succeed(Stack(**{**SCRIPTS, "control": control}), errands)
    assert lengths == {1, 2, 3}


def test_trained_layers_are_given_what_their_environments_show() -> None:
    seen = {}

    class Agent:
        state = None

        def act(self, obs):
            seen.update(obs)
            return np.array([[0.25, 0.5, 0.9], [0.1, 0.2, -0.4]])

    errands = [Errand(0), Errand(1)]
    found = stack.agent_semantic(Agent())(errands, ["drop it", "pick up the red key"])
    assert found == [(0.25, 0.5, 1.0), (0.1, 0.2, 0.0)]
    space = Points.spaces.obs
    assert all(space[name].shape == part.shape[1:] and space[name].dtype == part.dtype for name, part in seen.items())
    spaces = make("Glide-v0", num_envs=2).spaces
    agent = SimpleNamespace(module=tdmpc2, state=tdmpc2.build(tdmpc2.Config(iterations=1), spaces))
    offset, velocity = torch.tensor([[0.9, 0.0], [0.0, -0.1]]), torch.zeros(2, 2)
    thrust, carry = stack.agent_control(agent)(offset, velocity, None)
    assert thrust.shape == (2, 2) and carry.shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("text", "sense", "locked", "steps", "status"),
    [
        ("pick up the red ball", {"hand": "red ball"}, "", 5, "done"),
        ("pick up the red ball", {"hand": "red box"}, "", 5, "failed"),
        ("pick up the red ball", {}, "", 149, "running"),
        ("pick up the red ball", {}, "", 150, "failed"),
        ("open the blue door", {"hand": "blue key"}, "blue", 5, "running"),
        ("open the blue door", {"hand": "blue key", "opened": "blue"}, "", 5, "done"),
        ("bring it to the red ball", {"slipped": "red box"}, "", 5, "failed"),
        ("bring it to the red ball", {}, "", 5, "done"),
        ("drop it", {"hand": "red ball"}, "", 5, "running"),
        ("fetch it", {}, "", 0, "failed"),
    ],
)
def test_reports(text: str, sense: dict[str, str], locked: str, steps: int, status: str) -> None:
    found = dataclasses.replace(Errand(0).sense(), **sense)
    assert stack.assess(Subgoal(text), found, locked, steps)[0] == status


@pytest.mark.parametrize("kind", ["cognition", "semantic"])
def test_without_a_layer_errands_fail(kind: str) -> None:
    layers = {**SCRIPTS, kind: stack.layer(kind, "none")}
    episodes = stack.run(Stack(**layers), [one for one in (Errand(seed) for seed in range(30)) if one.lock is not None])
    summary = stack.summary(episodes)
    assert summary["episodes"] == len(episodes) > 10 and summary["success"] < 0.7


def test_a_language_model_is_asked_each_question_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rollout, "complete", lambda policy, prompts, *rest: asked.extend(prompts) or prompts)
    answer = " pick up the red key; bring it to the cyan box.\nTask: another"
    monkeypatch.setattr(rollout, "texts", lambda policy, batch: [answer for _ in batch])
    plans = stack.model_cognition(None)
    told = [Report("failed", "time is over"), Report("failed", "the blue door is locked", "red key", "blue")]
    for _ in range(2):
        found = plans(["bring the red key to the cyan box"] * 3, [*told, told[0]])
        assert found == [[Subgoal("pick up the red key"), Subgoal("bring it to the cyan box")]] * 3
    assert len(asked) == 2 and any("Hand: red key. Locked: the blue door." in one for one in asked)


def test_an_errand_without_plans_ends_by_its_limit_and_unfit_layers_get_a_sentence() -> None:
    layers = {**SCRIPTS, "cognition": lambda words, reports: [[] for _ in words]}
    (episode,) = stack.run(Stack(**layers), [Errand(0)])
    assert not episode.errand.success and episode.log[-1]["text"] == "no plan"
    with pytest.raises(UserError, match="not a run directory"):
        stack.layer("control", "nowhere", "cpu")
