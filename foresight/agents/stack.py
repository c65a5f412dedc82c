"""Three layers that act together, each with a clock of its own: cognition, a semantic policy, and control.

    cognition   instruction, Report  ->  plan: Subgoals in words             when a plan ends or fails
    semantic    picture, Subgoal     ->  Chunk: a point and the gripper      every `look_every` steps
    control     offset, velocity     ->  thrust                              every step

What the sensors find goes up as a `Report`: a plan that failed is replaced by a new one, made for what the hand holds
and which door is known to be locked. A layer is a function, so a language model, a trained policy and a script are
exchanged freely; `layer` has them by name. The task is `envs.control.errands`.

Below all layers: without a Chunk, or with one older than `stale` steps, the disc brakes; thrust is finite and in
[-1, 1]; the gripper acts only near the point, and slowly.

The division of work is that of SayCan (Ahn et al. 2022, arXiv:2204.01691): words choose skills, and skills act.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Tree
from foresight.envs.control.errands import glide, points, script
from foresight.envs.control.errands.rules import LIMIT, Errand, Sense
from foresight.errors import UserError

DEADLINE = 150  # steps of a subgoal
PLAN_TOKENS = 64  # of a language model


@dataclasses.dataclass(frozen=True)
class Subgoal:
    """What cognition asks the semantic policy for; it fails after `deadline` steps."""

    text: str
    deadline: int = DEADLINE


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the semantic policy asks control for: a point, what the gripper does there, and the step it is from."""

    point: tuple[float, float]
    grip: float
    step: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What goes up to cognition. `hand` and `locked`, the color of a door, are what the sensors found so far."""

    status: str  # "begins", "done" or "failed"
    reason: str
    hand: str = ""
    locked: str = ""
    step: int = 0


Cognition = Callable[[Sequence[str], Sequence[Report]], list[list[Subgoal]]]
Semantic = Callable[[Sequence[Errand], Sequence[str]], list[tuple[float, float, float]]]
Control = Callable[
    [Tensor, Tensor, Tree], tuple[Tensor, Tree]
]  # offset, velocity [B, 2], carry -> thrust [B, 2], carry


@dataclasses.dataclass(frozen=True)
class Stack:
    """Three layers and their clocks, in steps of control. Raises UserError for a clock below 1."""

    cognition: Cognition
    semantic: Semantic
    control: Control
    think_every: int = 10
    look_every: int = 5
    stale: int = 20

    def __post_init__(self) -> None:
        """Check the clocks."""
        for name in ("think_every", "look_every", "stale"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: a clock has at least 1 step.")


@dataclasses.dataclass
class Episode:
    """One errand with the plan, the chunk and the report that its layers exchange, and what they did."""

    errand: Errand
    plan: list[Subgoal] = dataclasses.field(default_factory=list)
    chunk: Chunk | None = None
    report: Report | None = Report("begins", "it begins")  # None: cognition is not asked
    locked: str = ""
    began: int = 0  # the step of the current subgoal
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def note(self, layer: str, text: str) -> None:
        """Add to the log."""
        self.log.append({"step": self.errand.time, "layer": layer, "text": text})


def run(stack: Stack, errands: Sequence[Errand], watched: Callable[[], None] = lambda: None) -> list[Episode]:
    """Let one stack act in all errands until each has ended. `watched` is called after every step."""
    episodes = [Episode(errand) for errand in errands]
    carry, before, step = None, episodes, 0
    while going := [one for one in episodes if not one.errand.over]:
        if len(going) < len(before):
            carry = trees.pick(carry, torch.tensor([i for i, one in enumerate(before) if not one.errand.over]))
        if step % stack.think_every == 0:
            think(stack, [one for one in going if one.report is not None])
        if step % stack.look_every == 0:
            look(stack, [one for one in going if one.plan])
        carry = move(stack, going, carry)
        for one in going:
            report(one)
        before, step = going, step + 1
        watched()
    return episodes


def think(stack: Stack, episodes: Sequence[Episode]) -> None:
    """Ask cognition for the plans of episodes that have a report."""
    if not episodes:
        return
    plans = stack.cognition([one.errand.instruction for one in episodes], [_report(one) for one in episodes])
    for one, plan in zip(episodes, plans, strict=True):
        one.plan, one.chunk, one.report, one.began = list(plan), None, None, one.errand.time
        one.note("cognition", "; ".join(subgoal.text for subgoal in plan) or "no plan")
        if not plan:
            _ask(one, "failed", "there is no plan")


def look(stack: Stack, episodes: Sequence[Episode]) -> None:
    """Ask the semantic policy for the chunks of episodes that have a subgoal."""
    if not episodes:
        return
    found = stack.semantic([one.errand for one in episodes], [one.plan[0].text for one in episodes])
    for one, (x, y, grip) in zip(episodes, found, strict=True):
        one.chunk = Chunk((x, y), grip, one.errand.time)


def move(stack: Stack, episodes: Sequence[Episode], carry: Tree) -> Tree:
    """One step of all episodes, by control within its limits; returns the carry of control."""
    places = torch.tensor([one.errand.place for one in episodes])
    velocity = torch.tensor([one.errand.velocity for one in episodes])
    live = [one.chunk is not None and one.errand.time - one.chunk.step <= stack.stale for one in episodes]
    wanted = [one.chunk.point if one.chunk is not None else one.errand.place for one in episodes]
    offset = torch.tensor(wanted) - places
    thrust, carry = stack.control(offset, velocity, carry)
    for one, (dx, dy), (vx, vy), (right, down), alive in zip(
        episodes, offset.tolist(), velocity.tolist(), safe(thrust).tolist(), live, strict=True
    ):
        if not alive or one.chunk is None:
            one.errand.step(*script.steer((0.0, 0.0), (vx, vy)), script.KEEP)
        else:
            there = script.arrived((dx, dy), (vx, vy))
            one.errand.step(right, down, one.chunk.grip if there else script.KEEP)
    return carry


def safe(thrust: Tensor) -> Tensor:
    """Thrust within its limits: 0 where it is not a number."""
    return thrust.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)


def report(one: Episode) -> None:
    """Compare what the sensors found with the subgoal: go on to the next, or ask cognition."""
    sense = one.errand.sense()
    one.locked = sense.touched or ("" if sense.opened else one.locked)
    if not one.plan:
        return
    subgoal = one.plan[0]
    status, reason = assess(subgoal, sense, one.locked, one.errand.time - one.began)
    if status == "running":
        return
    one.note("control", f"{status}: {reason}")
    one.chunk, one.began = None, one.errand.time
    if status == "done":
        one.plan.pop(0)
        if not one.plan:
            _ask(one, "done", "the plan is done")
    else:
        one.plan.clear()
        _ask(one, "failed", reason)


def assess(subgoal: Subgoal, sense: Sense, locked: str, steps: int) -> tuple[str, str]:
    """The status of a subgoal after `steps` steps, "running", "done" or "failed", and why."""
    found = script.SUBGOAL.fullmatch(subgoal.text)
    if found is None:
        return "failed", "the subgoal is not known"
    if sense.slipped:
        return "failed", f"the {sense.slipped} slipped"
    if sense.touched:
        return "failed", f"the {sense.touched} door is locked"
    if found["pick"] and sense.hand:
        same = sense.hand == found["pick"]
        return ("done", subgoal.text) if same else ("failed", f"the hand has the {sense.hand}")
    if (found["open"] and locked != found["open"]) or ((found["drop"] or found["bring"]) and not sense.hand):
        return "done", subgoal.text
    return ("failed", "time is over") if steps >= subgoal.deadline else ("running", "")


def _ask(one: Episode, status: str, reason: str) -> None:
    one.report = Report(status, reason, one.errand.sense().hand, one.locked, one.errand.time)


def _report(one: Episode) -> Report:
    """The report of an episode, with what the sensors find now."""
    assert one.report is not None
    return dataclasses.replace(one.report, hand=one.errand.sense().hand, locked=one.locked)


# --- the layers


def scripted_cognition(instructions: Sequence[str], reports: Sequence[Report]) -> list[list[Subgoal]]:
    """The plans of the script."""
    pairs = zip(instructions, reports, strict=True)
    return [[Subgoal(text) for text in script.plan(words, told.hand, told.locked)] for words, told in pairs]


def no_cognition(instructions: Sequence[str], reports: Sequence[Report]) -> list[list[Subgoal]]:
    """The instruction itself is the only subgoal, whatever is reported."""
    return [[Subgoal(words, LIMIT)] for words in instructions]


def model_cognition(policy: Any) -> Cognition:
    """A language model that plans. Equal questions are asked once."""
    from foresight.planning.generation import rollout

    known: dict[str, str] = {}

    def plans(instructions: Sequence[str], reports: Sequence[Report]) -> list[list[Subgoal]]:
        pairs = zip(instructions, reports, strict=True)
        asked = [script.ask(words, told.reason, told.hand, told.locked) for words, told in pairs]
        if new := sorted({one for one in asked if one not in known}):
            batch = rollout.complete(policy, new, 1, PLAN_TOKENS, 0.0)
            known.update(zip(new, rollout.texts(policy, batch), strict=True))
        return [[Subgoal(text) for text in script.read(known[one])] for one in asked]

    return plans


def scripted_semantic(errands: Sequence[Errand], texts: Sequence[str]) -> list[tuple[float, float, float]]:
    """The points of the script, which reads where everything is instead of the picture."""
    return [script.point(errand, text) for errand, text in zip(errands, texts, strict=True)]


def no_semantic(errands: Sequence[Errand], texts: Sequence[str]) -> list[tuple[float, float, float]]:
    """A random point and gripper, by the time: nobody reads the subgoal."""
    found = []
    for errand in errands:
        draw = np.random.default_rng([errand.time, len(errand.instruction)])
        found.append((*draw.uniform(size=2).tolist(), float(draw.integers(-1, 2))))
    return found


def agent_semantic(agent: Any) -> Semantic:
    """A trained policy that looks at the picture, such as a VLA."""

    def look(errands: Sequence[Errand], texts: Sequence[str]) -> list[tuple[float, float, float]]:
        seen = [points.observation(errand, text) for errand, text in zip(errands, texts, strict=True)]
        action = agent.act({name: np.stack([one[name] for one in seen]) for name in seen[0]})
        return [(float(x), float(y), float(round(grip))) for *_, x, y, grip in action.tolist()]

    return look


def scripted_control(offset: Tensor, velocity: Tensor, carry: Tree) -> tuple[Tensor, Tree]:
    """A spring with damping."""
    pairs = zip(offset.tolist(), velocity.tolist(), strict=True)
    return torch.tensor([script.steer(tuple(d), tuple(v)) for d, v in pairs]), carry


def no_control(offset: Tensor, velocity: Tensor, carry: Tree) -> tuple[Tensor, Tree]:
    """Full thrust toward the point, whatever the velocity."""
    return offset.sign(), carry


def agent_control(agent: Any) -> Control:
    """A trained agent of Glide-v0; what it remembers is its carry."""
    from foresight.runtime import machine

    def act(offset: Tensor, velocity: Tensor, carry: Tree) -> tuple[Tensor, Tree]:
        obs = glide.observation(offset.clamp(-glide.FAR, glide.FAR), velocity).to(machine.device_of(agent.state))
        action, _, carry = agent.module.act(agent.state, obs, carry)
        return action.cpu(), carry

    return act


LAYERS: dict[str, dict[str, Any]] = {
    "cognition": {"script": scripted_cognition, "none": no_cognition},
    "semantic": {"script": scripted_semantic, "none": no_semantic},
    "control": {"script": scripted_control, "none": no_control},
}
TRAINED = {"semantic": "ErrandPoints-v0", "control": "Glide-v0"}  # the environments of agents


def layer(kind: str, name: str, device: str = "auto") -> Any:
    """A layer by name: "script", "none", or what was trained: a language model of cognition, else a run.

    Raises UserError for a name of neither, and for a run of another environment.
    """
    if name in LAYERS[kind]:
        return LAYERS[kind][name]
    from foresight.runtime import machine, run
    from foresight.runtime.reasoning import think as thinking

    if kind == "cognition":
        return model_cognition(thinking.model(name, machine.pick_device(device)))
    agent = run.load(name, device=device)
    if agent.settings.env != TRAINED[kind]:
        raise UserError(
            f"{name} was trained on '{agent.settings.env}', but the layer '{kind}' needs a run of {TRAINED[kind]}. "
            f"Give such a run, or: --{kind} script"
        )
    return agent_semantic(agent) if kind == "semantic" else agent_control(agent)


def summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The share of successes, also of the episodes with an injected failure, and means over episodes."""
    hit = [one for one in episodes if one.errand.injected]

    def share(few: Sequence[Episode]) -> float | None:
        return round(sum(one.errand.success for one in few) / len(few), 4) if few else None

    plans = [sum(line["layer"] == "cognition" for line in one.log) for one in episodes]
    return {
        "episodes": len(episodes),
        "success": share(episodes),
        "with_failures": len(hit),
        "recovered": share(hit),
        "steps": round(sum(one.errand.time for one in episodes) / len(episodes), 1),
        "plans": round(sum(plans) / len(plans), 2),
    }
