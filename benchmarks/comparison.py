"""MuZero versus STORM, and which one when: planners, agents that imagine, and model-free ones on the same tasks.

python benchmarks/comparison.py                                # runs what is missing in results/comparison.json
python benchmarks/comparison.py --tasks CartPole-v1 --algorithms MuZero STORM --seeds 0 1 --limit 25
python benchmarks/comparison.py --train-noise 0.3 1 3          # agents that imagine, trained in wrong imagination
python benchmarks/comparison.py --page                         # only writes the page and the picture again

A cell is one algorithm on one task with one seed: its preset, trained until the preset's steps or the task's minutes
are over. One run answers both questions: the return at equal environment steps and at equal minutes. It is that of the
greedy policy in 10 episodes, in environments that it was not trained in, at fixed numbers of steps and of minutes.
Minutes are CPU time of training on one thread, without evaluations. Every cell is a process of its own. `--limit` is
the number of minutes after which no further cell begins. A stopped benchmark resumes when it is started again; cells
whose preset has changed since are trained again.

At the end the learned dynamics are made wrong: noise in units of the standard deviation of each predicted feature is
added to what they predict while the agent acts. Agents without a model have none. With `--train-noise` agents that
imagine are trained again, with noise in their imagination only: after every imagined step, of the standard deviation of
each feature of h over the rollouts, times the factor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = ROOT / "results" / "comparison.json", ROOT / "docs" / "comparison.md"
PICTURE = ROOT / "docs" / "media" / "comparison.png"
CURVE = 10  # episodes of an evaluation
DECISIONS = 100  # single decisions that are timed
REPORT = 100  # env steps between two yields, of algorithms that yield less often
NOISE = (0.3, 1.0, 3.0)  # standard deviations
CLOSE = 0.02  # returns are called equal within this share of the range from random to best

PLANS, IMAGINES, FREE = "plans", "imagines", "model-free"
KINDS = {
    "MuZero": PLANS, "EfficientZero": PLANS, "TD-MPC2": PLANS, "STORM": IMAGINES, "DreamerV3": IMAGINES,
    "PPO": FREE, "SAC": FREE, "DQN": FREE, "IMPALA": FREE,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: the marks at which returns are compared, and how each algorithm is run on it."""

    steps: tuple[int, ...]  # env steps
    minutes: tuple[float, ...]  # the last one ends a run
    agents: Mapping[str, tuple[str, str, Mapping[str, Any]]]  # by name: algorithm, preset ("": none), fields


PIXELS = {"num_envs": 8, "images": "nips", "gamma": 0.97, "replay_size": 50_000, "learning_starts": 2_000}
TASKS = {
    "CartPole-v1": Task(
        (1_000, 2_000, 4_000, 10_000, 50_000),
        (0.1, 1, 2, 4, 8),
        {
            "PPO": ("ppo", "CartPole-v1", {}),
            "IMPALA": ("impala", "CartPole-v1", {}),
            "MuZero": ("muzero", "CartPole-v1", {}),
            "STORM": ("storm", "CartPole-v1", {}),
            "DreamerV3": ("dreamer", "CartPole-v1", {}),
            "DQN": ("dqn", "CartPole-v1", {}),
            "EfficientZero": ("efficientzero", "CartPole-v1", {}),
            "SAC": ("sac_discrete", "CartPole-v1", {}),
        },
    ),
    "Pendulum-v1": Task(
        (1_000, 2_000, 4_000, 10_000, 50_000),
        (0.1, 0.5, 1, 2, 4),
        {
            "PPO": ("ppo", "Pendulum-v1", {}),
            "TD-MPC2": ("tdmpc2", "Pendulum-v1", {}),
            "SAC": ("sac", "Pendulum-v1", {}),
            "MuZero": ("sampled_muzero", "Pendulum-v1", {}),
            "DreamerV3": ("dreamer", "CartPole-v1", {}),
            "STORM": ("storm", "CartPole-v1", {}),
            "IMPALA": ("impala", "CartPole-v1", {}),
        },
    ),
    "KeyDoor-v0": Task(
        (5_000, 10_000, 20_000, 50_000),
        (1, 2, 4, 8),
        {
            "STORM": ("storm", "KeyDoor-v0", {}),
            "DreamerV3": ("dreamer", "KeyDoor-v0", {}),
            "PPO": ("ppo", "KeyDoor-v0", {"steps": 400_000}),
            "MuZero": (
                "muzero",
                "",
                {
                    **PIXELS, "steps": 50_000, "simulations": 16, "n_steps": 10, "train_every": 8, "reanalyze": 0.25,
                    "batch_size": 64, "latent_size": 128,
                },
            ),
            "DQN": (
                "dqn",
                "",
                {
                    **PIXELS, "steps": 200_000, "learning_rate": 2.5e-4, "adam_epsilon": 1.5e-4, "batch_size": 32,
                    "train_every": 4, "double": True, "n_steps": 3, "target_every": 1_000, "epsilon_fraction": 0.2,
                    "epsilon_end": 0.04,
                },
            ),
            "EfficientZero": (
                "efficientzero",
                "",
                {
                    **PIXELS, "steps": 50_000, "simulations": 16, "train_every": 8, "reanalyze": 0.25, "batch_size": 64,
                    "latent_size": 128,
                },
            ),
            "IMPALA": (
                "impala",
                "",
                {
                    "images": "nips", "gamma": 0.97, "steps": 400_000, "num_envs": 16, "rollout_steps": 32,
                    "rollouts_per_update": 1, "optimizer": "adam", "max_grad_norm": 1.0, "learning_rate": 1e-3,
                    "entropy_coef": 0.01,
                },
            ),
            "SAC": (
                "sac_discrete",
                "",
                {
                    **PIXELS, "steps": 100_000, "learning_rate": 3e-4, "batch_size": 64, "train_every": 4,
                    "target_entropy": 0.3,
                },
            ),
        },
    ),
}  # fmt: skip


def config_of(task: str, agent: str, seed: int) -> tuple[Any, Any]:
    """The module of the algorithm, and its Config for a cell."""
    from foresight.runtime import catalog
    from foresight.runtime.config import config_fields
    from foresight.training.options import build_config

    algorithm, preset, fields = TASKS[task].agents[agent]
    base = catalog.presets(algorithm)[preset] if preset else {}
    values = config_fields.fields(algorithm, {**base, **fields, "seed": seed})
    return catalog.module(algorithm), build_config(catalog.config_class(algorithm), **values)


def settings(task: str, agent: str) -> dict[str, Any]:
    """The fields of a cell that are not the algorithm's defaults, as JSON has them."""
    from foresight.training.options import flatten

    module, config = config_of(task, agent, seed=0)
    defaults = flatten(module.Config())
    return dict(json.loads(json.dumps({k: v for k, v in flatten(config).items() if v != defaults[k] and k != "seed"})))


def trained(cells: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, int, float]]:
    """The cells that need not be trained again: not those whose preset has changed since."""
    return {key(one) for one in cells if one.get("settings") in (None, settings(one["task"], one["agent"]))}


class Marks:
    """The marks of steps and seconds that a run has not yet passed."""

    def __init__(self, task: Task) -> None:
        self.steps, self.seconds = list(task.steps), [60 * m for m in task.minutes]

    def passed(self, step: int, seconds: float) -> bool:
        """Whether a mark was passed since the last call."""
        count = len(self.steps) + len(self.seconds)
        self.steps = [mark for mark in self.steps if mark > step]
        self.seconds = [mark for mark in self.seconds if mark > seconds]
        return len(self.steps) + len(self.seconds) < count


class Noise:
    """Adds noise to predictions `[..., D]`: `scale` times the standard deviation of each feature, as seen at scale 0.

    The noise is drawn from a generator of its own.
    """

    def __init__(self) -> None:
        import torch

        self.scale, self.count = 0.0, 0
        self.sum: Any = 0.0
        self.squares: Any = 0.0
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Any) -> Any:
        """The predictions with noise."""
        flat = x.detach().flatten(0, -2).double()
        if not self.scale:
            self.count += len(flat)
            self.sum, self.squares = self.sum + flat.sum(0), self.squares + flat.square().sum(0)
            return x
        mean = self.sum / self.count
        std = (self.squares / self.count - mean.square()).clamp(min=0).sqrt().to(x.dtype)
        return x + self.scale * std * x.new_empty(x.shape).normal_(generator=self.generator)


@contextlib.contextmanager
def wrong_dynamics(agent: str, state: Any, noise: Noise) -> Iterator[str]:
    """Within, the learned dynamics of the State are wrong by `noise`; yields what is wrong, "" if there is no model."""
    if agent in ("MuZero", "EfficientZero"):
        network = state.network
        advance = network.advance

        def wrong(before: Any, action: Any) -> Any:
            after = advance(before, action)
            if isinstance(after, dict):
                return {**after, "latent": noise(after["latent"])}
            return noise(after[0]), after[1]

        network.advance = wrong
        try:
            yield "the next latent, at every step of the search"
        finally:
            del network.advance
    elif agent == "TD-MPC2":
        handle = state.model.dynamics.register_forward_hook(lambda module, inputs, output: noise(output))
        try:
            yield "the next latent, at every step of a plan"
        finally:
            handle.remove()
    elif agent == "DreamerV3":
        observe = state.model.observe

        def wrong_state(*inputs: Any) -> Any:
            found = observe(*inputs)
            return {**found, "deter": noise(found["deter"])}

        state.model.observe = wrong_state
        try:
            yield "the recurrent state, at every step of acting; it stays in the memory"
        finally:
            del state.model.observe
    elif agent == "STORM":
        sequence = state.model.sequence
        read = sequence.read
        sequence.read = lambda *inputs: noise(read(*inputs))
        try:
            yield "the output of the transformer, at every step of acting"
        finally:
            del sequence.read
    else:
        yield ""


@contextlib.contextmanager
def wrong_imagination(agent: str, state: Any, scale: float) -> Iterator[None]:
    """Within, h is wrong after every imagined step: by `scale` standard deviations over the rollouts, of each feature.

    Acting and the model's own training are as ever. Raises ValueError for agents that do not imagine.
    """
    import torch

    from foresight.nets.models import rssm

    if KINDS[agent] != IMAGINES:
        raise ValueError(f"{agent} is not trained in imagination.")
    generator = torch.Generator().manual_seed(0)
    model, sequence = state.model, getattr(state.model, "sequence", None)
    owner, name = (model, "_advance") if sequence is None else (sequence, "step")
    right, imagine = getattr(owner, name), model.imagine

    def blurred(h: Any) -> Any:
        return h + scale * h.std(0) * torch.empty_like(h).normal_(generator=generator)

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return (blurred(found[0]), *found[1:]) if isinstance(found, tuple) else blurred(found)

    def imagined(*given: Any) -> Any:  # the readable loop of RSSM, whose compiled twin has no such step
        with mock.patch.object(owner, name, wrong), mock.patch.object(rssm, "compiled", lambda *tensors: False):
            return imagine(*given)

    with mock.patch.object(model, "imagine", imagined):
        yield


def gradient_steps(state: Any) -> int:
    """The steps that the State counts, or else those of the optimizer that made the most."""
    counted = [getattr(state, name, 0) for name in ("gradient_steps", "updates")]
    for value in vars(state).values():
        for part in getattr(value, "state", {}).values() if hasattr(value, "param_groups") else ():
            counted.append(int(part.get("step", 0)))
    return max(counted)


def cell(task: str, agent: str, seed: int, scale: float = 1.0, train_noise: float = 0.0) -> dict[str, Any]:
    """Train and measure one cell, in imagination with `train_noise`; `scale` shrinks steps and minutes, for tests."""
    import torch

    from foresight.data.trajectory import tree_map
    from foresight.envs.make import make
    from foresight.runtime import machine
    from foresight.runtime.evaluation import returns
    from foresight.runtime.evaluation.evaluate import preserve_generators

    torch.set_num_threads(1)
    machine.seed_everything(seed)
    began = time.perf_counter()
    what = TASKS[task]
    what = dataclasses.replace(
        what, steps=tuple(int(scale * s) for s in what.steps), minutes=tuple(scale * m for m in what.minutes)
    )
    module, config = config_of(task, agent, seed)
    if hasattr(module, "REPORT"):
        module.REPORT = min(module.REPORT, max(1, int(scale * REPORT)))
    outside, one = make(task, num_envs=CURVE), make(task, num_envs=1)
    before = machine.peak_gib()
    env = make(task, num_envs=config.num_envs)
    state = module.build(config, env.spaces, "cpu")

    def act(obs: Any, carry: Any) -> Any:
        action, _, carry = module.act(state, obs, carry, explore=False)
        return action, carry

    reset_carry = getattr(module, "reset_carry", None)

    def score() -> float:
        with preserve_generators(state):
            return float(returns.evaluate(outside, act, CURVE, seed, reset_carry).mean)

    random = returns.evaluate(outside, returns.random_policy(outside, seed), CURVE, seed, None).mean
    points: list[dict[str, float]] = []
    marks, seconds, step = Marks(what), 0.0, 0
    steps = module.train(config, env, state=state)
    while seconds < 60 * what.minutes[-1]:
        start = time.process_time()
        with wrong_imagination(agent, state, train_noise) if train_noise else contextlib.nullcontext():
            item = next(steps, None)
        seconds += time.process_time() - start
        if item is None:
            break
        step = int(item[0])
        if marks.passed(step, seconds):
            points.append({"step": step, "seconds": round(seconds, 2), "return": round(score(), 4)})
    finished = step >= config.steps
    peak = 2**10 * (machine.peak_gib() - before)  # MiB
    steps.close()
    if not points or points[-1]["step"] != step:
        points.append({"step": step, "seconds": round(seconds, 2), "return": round(score(), 4)})

    obs, carry = one.reset(seed), None
    with preserve_generators(state):
        for i in range(10 + DECISIONS):
            if i == 10:
                start = time.process_time()
            _, carry = act(tree_map(lambda x: x, obs), carry)
        decision = 1_000 * (time.process_time() - start) / DECISIONS

    noise, found = Noise(), {}
    with wrong_dynamics(agent, state, noise) as where:
        for noise.scale in (0.0, *(NOISE if where else ())):
            found[str(noise.scale)] = round(score(), 4)
    for made in (env, outside, one):
        made.close()
    return {
        "task": task, "agent": agent, "seed": seed, "algorithm": TASKS[task].agents[agent][0],
        "settings": settings(task, agent),
        "random": round(float(random), 4), "points": points, "finished": finished, "steps": step,
        "training_seconds": round(seconds, 1), "gradient_steps": gradient_steps(state),
        "decision_ms": round(decision, 3), "peak_mib": round(peak, 1), "wrong": where, "noise": found,
        **({"train_noise": train_noise} if train_noise else {}),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def load(file: Path = FILE) -> list[dict[str, Any]]:
    """The cells so far, those with noise in imagination last."""
    result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cells": []}
    return [*result["cells"], *result.get("wrong_imagination", [])]


def key(found: Mapping[str, Any]) -> tuple[str, str, int, float]:
    """The identity of a cell."""
    return found["task"], found["agent"], found["seed"], found.get("train_noise", 0.0)


def at(found: dict[str, Any], axis: str, mark: float) -> float | None:
    """The return of a cell at `mark` of `axis` ("step" or "seconds").

    That of the last evaluation if the run was finished before; None if it was cut off before.
    """
    later = [point for point in found["points"] if point[axis] >= mark]
    if later:
        return float(later[0]["return"])
    return float(found["points"][-1]["return"]) if found["finished"] else None


def reached(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean over seeds, and `_range`, of the returns at all marks, by task and agent."""
    found: dict[str, Any] = {}
    for task, what in TASKS.items():
        marks = [("step", "steps", s, float(s)) for s in what.steps]
        marks += [("seconds", "minutes", m, 60.0 * m) for m in what.minutes]  # type: ignore[misc]
        for agent in what.agents:
            mine = [one for one in cells if (one["task"], one["agent"]) == (task, agent)]
            for axis, unit, label, mark in marks:
                values = [value for one in mine if (value := at(one, axis, mark)) is not None]
                if values and len(values) == len(mine):
                    place = found.setdefault(task, {}).setdefault(agent, {})
                    place[f"{unit}_{label:g}"] = round(statistics.fmean(values), 4)
                    place[f"{unit}_{label:g}_range"] = [min(values), max(values)]
    return found


def document(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of these cells; those with noise in imagination are a list of their own."""
    from foresight.runtime import bench

    cells = [one for one in every if "train_noise" not in one]
    noisy = sorted((one for one in every if "train_noise" in one), key=key)
    ran = [task for task in TASKS if any(one["task"] == task for one in cells)]
    command = ["python", "benchmarks/comparison.py", *(["--tasks", *ran] if len(ran) < len(TASKS) else [])]
    seeds: dict[tuple[str, str], set[int]] = {}
    for one in cells:
        seeds.setdefault((one["task"], one["agent"]), set()).add(one["seed"])
    order = {(task, agent): i for i, (task, agent) in enumerate((t, a) for t in TASKS for a in TASKS[t].agents)}
    return {
        "what": "planners, agents that imagine, and model-free ones at equal steps and at equal minutes",
        "command": shlex.join([*command, "--seeds", *(str(s) for s in sorted({c["seed"] for c in cells}))]),
        "seeds": sorted(set.intersection(*seeds.values())) if seeds else [],  # that every agent has
        "reached": reached(cells),
        "seconds": round(sum(c["seconds"] for c in every), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "cells": sorted(cells, key=lambda c: (order[c["task"], c["agent"]], c["seed"])),
        **({"wrong_imagination": noisy} if noisy else {}),
    }


# The page

HEAD = """# MuZero versus STORM, and which one when

Made by [`benchmarks/comparison.py`](../benchmarks/comparison.py) from its
[figures](../results/comparison.json). No figure is written by hand; `python benchmarks/tables.py` writes the page
again.

- A cell is one algorithm on one task with one seed: its preset, trained until the preset's steps or the task's minutes
  are over (PPO in KeyDoor-v0: for more steps than its preset has). The presets are tuned for their own tasks. STORM,
  DreamerV3 and IMPALA have no preset of Pendulum-v1 and are run with that of CartPole-v1. In KeyDoor-v0 only STORM,
  DreamerV3 and PPO have one; the others have settings that were written for this benchmark and tried once.
- A return is the mean of the greedy policy over {curve} episodes, in environments that it was not trained in. "–": the
  minutes were over before. A run that was finished keeps its last return.
- Minutes are CPU time of training on one thread, without evaluations.{machines}
- MuZero and EfficientZero plan by tree search in a learned model (in Pendulum-v1 MuZero is `sampled_muzero`), TD-MPC2
  by MPPI. STORM and DreamerV3 act by a policy that was trained in imagination. PPO, SAC (`sac_discrete` where actions
  are discrete), DQN and IMPALA learn no model.
- TD-MPC2 has continuous actions only; DQN and EfficientZero have discrete ones only.
"""
MACHINES = """
- Cells were run on machines of different kinds, some beside other work, so ranges at equal minutes include the speed of
  the machine."""
NOTES = """Within 2% of the range from random actions to the best, several agents are best. `gradient steps` are those
of the optimizer that made the most. `ms a decision` is CPU time of the greedy policy for one observation. `memory` is
the peak of the process, beyond what it took before the agent was built."""
WRONG = """The greedy policy of the end of training, in {curve} episodes. Noise is added to what the learned dynamics
predict, while the agent acts: its standard deviation is that of the predicted feature in evaluation, times the factor
of the column. For planners this is a wrong model at decision time: {planners}. Agents that were trained in imagination
use of their model only the state that they act on: {imagining}. {trained} Model-free agents have no model."""
UNTRAINED = "Noise in the imagination of training was not measured."
TRAINED = """Trained again with noise in imagination only: after every imagined step h is off by the factor of the
column times the standard deviation of each feature over the rollouts. Returns without noise while acting
(`python benchmarks/comparison.py --train-noise {scales}`)."""


FEW = """Cells with one seed show how long the code takes, and differences as large as that between learning and not
learning. They do not rank agents whose returns are close: with {curve} episodes and one seed, the order of two agents
may turn with the next seed, and the spread over seeds is not known."""
PRESETS = """Algorithms are not compared at their best: the presets differ in how much work went into them, and {curve}
episodes do not tell agents apart whose returns are close."""
TITLES = {PLANS: "agents that plan", IMAGINES: "agents that imagine", FREE: "model-free agents"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def shown(value: float | None, spread: Sequence[float] | None = None) -> str:
    """A return, with its range over seeds."""
    if value is None:
        return "–"
    text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}"
    return text if spread is None else f"{text} [{shown(spread[0])}, {shown(spread[1])}]"


def row(place: Mapping[str, Any], keys: Sequence[str], seeds: int) -> list[str]:
    """The returns at marks, with ranges if there are several seeds."""
    return [shown(place.get(name), place.get(f"{name}_range") if seeds > 1 else None) for name in keys]


def ranked(place: Mapping[str, Any], name: str) -> list[tuple[str, float]]:
    """Agents with a return at the mark, the best first."""
    found = [(agent, values[name]) for agent, values in place.items() if name in values]
    return sorted(found, key=lambda one: -one[1])


def best(place: Mapping[str, Any], name: str, random: float) -> list[str]:
    """The agents that are best at a mark, or close to it; none if fewer than two have a return or none beats random."""
    order = ranked(place, name)
    if len(order) < 2:
        return []
    top = order[0][1]
    if top <= random + CLOSE * abs(random):
        return []
    return [agent for agent, value in order if value >= top - CLOSE * (top - random)]


def named(agents: Sequence[str]) -> str:
    """Names in a sentence."""
    return agents[0] if len(agents) == 1 else ", ".join(agents[:-1]) + " and " + agents[-1]


def sections(result: Mapping[str, Any]) -> Iterator[str]:
    """One section a task."""
    cells = result["cells"]
    for task, what in TASKS.items():
        mine = [one for one in cells if one["task"] == task]
        if not mine:
            continue
        place, random = result["reached"].get(task, {}), statistics.fmean(one["random"] for one in mine)
        groups = {a: group for a in what.agents if (group := [one for one in mine if one["agent"] == a])}
        missing = [a for a in what.agents if a not in groups]
        yield f"## {task}"
        yield wrapped([f"Random actions: {shown(random)}." + (f" Not run yet: {named(missing)}." if missing else "")])
        for unit, marks in (("steps", what.steps), ("minutes", what.minutes)):
            names = [f"{unit}_{mark:g}" for mark in marks]
            names = [name for name in names if any(name in values for values in place.values())]
            head = [
                "agent",
                "kind",
                "seeds",
                *(f"{float(n.split('_')[1]):,g} {'steps' if unit == 'steps' else 'min'}" for n in names),
            ]
            yield table(
                head,
                [
                    [a, KINDS[a], str(len(group)), *row(place.get(a, {}), names, len(group))]
                    for a, group in groups.items()
                ],
            )
        yield table(
            ["agent", "steps", "minutes", "preset finished", "gradient steps", "ms a decision", "memory, MiB"],
            [
                [
                    a,
                    *(f"{mean(group, n):,.0f}" for n in ("steps",)),
                    f"{mean(group, 'training_seconds') / 60:.1f}",
                    "yes" if all(one["finished"] for one in group) else "no",
                    f"{mean(group, 'gradient_steps'):,.0f}",
                    f"{mean(group, 'decision_ms'):.2f}",
                    f"{mean(group, 'peak_mib'):,.0f}",
                ]
                for a, group in groups.items()
            ],
        )
        yield wrapped(winners(task, result))


def mean(group: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean over seeds."""
    return statistics.fmean(one[name] for one in group)


def random_return(task: str, result: Mapping[str, Any]) -> float:
    """The return of random actions in a task."""
    return statistics.fmean(one["random"] for one in result["cells"] if one["task"] == task)


def leaders(task: str, unit: str, result: Mapping[str, Any]) -> list[tuple[float, list[str]]]:
    """The marks at which at least two agents have a return and one beats random actions, and who is best there."""
    place, random = result["reached"].get(task, {}), random_return(task, result)
    marks = TASKS[task].steps if unit == "steps" else TASKS[task].minutes
    return [(float(m), names) for m in marks if (names := best(place, f"{unit}_{m:g}", random))]


def winners(task: str, result: Mapping[str, Any]) -> list[str]:
    """Sentences: who is best at each mark; marks with the same answer together."""
    lines = []
    for unit in ("steps", "minutes"):
        groups: dict[tuple[str, ...], list[str]] = {}
        for mark, names in leaders(task, unit, result):
            groups.setdefault(tuple(names), []).append(f"{mark:,g}")
        for together, marks in groups.items():
            lines.append(f"- Best at {named(marks)} {unit}: {named(together)}.")
    return lines


def wrong_model(result: Mapping[str, Any]) -> Iterator[str]:
    """The section of noise in the model."""
    cells = [one for one in result["cells"] if one["wrong"]]
    if not cells:
        return
    texts: dict[str, list[str]] = {PLANS: [], IMAGINES: []}
    for one in cells:
        if (text := f"{one['agent']}: {one['wrong']}") not in texts[KINDS[one["agent"]]]:
            texts[KINDS[one["agent"]]].append(text)
    planners, imagining = ("; ".join(texts[kind]) or "none was run" for kind in (PLANS, IMAGINES))
    yield "## When the model is wrong"
    noisy = result.get("wrong_imagination", [])
    trained = "How training in a wrong imagination ends is below." if noisy else UNTRAINED
    text = WRONG.format(curve=CURVE, planners=planners, imagining=imagining, trained=trained)
    yield textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)
    scales = ["0.0", *(str(scale) for scale in NOISE)]
    rows = []
    for task, what in TASKS.items():
        for agent in what.agents:
            group = [one for one in cells if (one["task"], one["agent"]) == (task, agent)]
            if group:
                values = [statistics.fmean(one["noise"][s] for one in group) for s in scales]
                rows.append([task, agent, str(len(group)), *(shown(v) for v in values), shown(mean(group, "random"))])
    yield table(["task", "agent", "seeds", "no noise", *(f"× {scale:g}" for scale in NOISE), "random actions"], rows)
    if noisy:
        yield from trained_wrong(cells, noisy)


def trained_wrong(cells: Sequence[dict[str, Any]], noisy: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What agents reach that were trained in a wrong imagination: of the seeds that every column has."""
    factors = sorted({one["train_noise"] for one in noisy})
    text = TRAINED.format(scales=" ".join(f"{factor:g}" for factor in factors))
    yield textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)
    ends = {key(one): one["noise"]["0.0"] for one in (*cells, *noisy)}
    rows = []
    for task, agent in dict.fromkeys(key(one)[:2] for one in noisy):
        found = {f: {k[2]: end for k, end in ends.items() if k == (task, agent, k[2], f)} for f in (0.0, *factors)}
        seeds = set.intersection(*(set(one) for one in found.values() if one))
        values = [shown(statistics.fmean(one[s] for s in seeds)) if one and seeds else "–" for one in found.values()]
        rows.append([task, agent, str(len(seeds)), *values])
    yield table(["task", "agent", "seeds", "no noise", *(f"× {factor:g}" for factor in factors)], rows)


def kept(result: Mapping[str, Any], kind: str) -> list[tuple[str, float]]:
    """`agent in task` and the share of the range from random to no noise that is left at the largest noise.

    A mean over the seeds whose range is at least a third of the largest in the task.
    """
    found: dict[str, list[float]] = {}
    for one in result["cells"]:
        gain = one["noise"]["0.0"] - one["random"]
        gains = (c["noise"]["0.0"] - c["random"] for c in result["cells"] if c["task"] == one["task"])
        if one["wrong"] and KINDS[one["agent"]] == kind and gain > 0 and gain >= max(gains) / 3:
            left = (one["noise"][str(NOISE[-1])] - one["random"]) / gain
            found.setdefault(f"{one['agent']} in {one['task']}", []).append(left)
    return [(name, statistics.fmean(shares)) for name, shares in found.items()]


def wrapped(lines: Sequence[str]) -> str:
    """A list of Markdown, 120 columns wide."""
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def first(task: str, unit: str, result: Mapping[str, Any]) -> str:
    """Who is best at the first mark at which half of the best return of the task is reached; "" if there is none."""
    place, random = result["reached"].get(task, {}), random_return(task, result)
    values = [value for one in place.values() for name, value in one.items() if not name.endswith("_range")]
    for mark, names in leaders(task, unit, result):
        value = place[names[0]][f"{unit}_{mark:g}"]
        if value - random >= (max(values) - random) / 2:
            return f"in {task} {named(names)} ({shown(value)} at {mark:,g} {unit if mark != 1 else unit[:-1]})"
    return ""


def advice(result: Mapping[str, Any]) -> Iterator[str]:
    """Which one when, from the figures alone."""
    yield "## Which one when"
    tasks = [task for task in TASKS if any(one["task"] == task for one in result["cells"])]
    lines = []
    for unit, when in (("steps", "a step of the environment is expensive"), ("minutes", "computing is expensive")):
        if parts := [text for task in tasks if (text := first(task, unit, result))]:
            lines.append(f"- Where {when}, take who is first at half of the best return: {'; '.join(parts)}.")
        marks = [names for task in tasks for _, names in leaders(task, unit, result)]
        if marks:
            counts = [f"{kind} {sum(any(KINDS[n] == kind for n in names) for names in marks)}" for kind in TITLES]
            texts = ", ".join(text.replace(kind, TITLES[kind]) for kind, text in zip(TITLES, counts, strict=True))
            lines.append(f"- Of {len(marks)} marks of {unit} on these tasks, so often among the best are: {texts}.")
    spans = []
    for kind, title in TITLES.items():
        if ms := [one["decision_ms"] for one in result["cells"] if KINDS[one["agent"]] == kind]:
            spans.append(f"{title} {min(ms):.2g} to {max(ms):.2g}")
    lines.append(f"- Where a decision must be quick, in milliseconds: {', '.join(spans)}.")
    for kind in (PLANS, IMAGINES):
        if left := kept(result, kind):
            texts = ", ".join(f"{name} {max(0.0, share):.0%}" for name, share in left)
            lines.append(
                f"- Where the model may be wrong: with noise of {NOISE[-1]:g} standard deviations, {TITLES[kind]} "
                f"keep of their gain over random actions: {texts}."
            )
    yield wrapped(lines)
    if missing := [task for task in TASKS if task not in tasks]:
        yield f"Tasks that were not run yet: {named(missing)}."
    few = sorted({len([c for c in result["cells"] if key(c)[:2] == key(one)[:2]]) for one in result["cells"]})
    if few and few[0] == 1:
        yield FEW.format(curve=CURVE)
    yield PRESETS.format(curve=CURVE)


def page(result: Mapping[str, Any]) -> str:
    """The whole page."""
    kinds = {one.get("instructions") for one in result["cells"]}
    parts = [HEAD.format(curve=CURVE, machines=MACHINES if len(kinds) > 1 else "").rstrip()]
    parts.append("![Return against steps and minutes](media/comparison.png)")
    parts += sections(result)
    parts.append(NOTES)
    parts += wrong_model(result)
    parts += advice(result)
    parts.append(f"## Again\n\n    {result['command']}")
    return "\n\n".join(parts) + "\n"


def write_page() -> None:
    """Write the page, if there are figures."""
    if FILE.is_file():
        PAGE.write_text(page(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8")


def draw(result: Mapping[str, Any]) -> None:
    """Draw the returns of every cell against steps and against minutes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(one["task"] == task for one in result["cells"])]
    figure = Figure(figsize=(9, 3.4 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    styles = {PLANS: "-", IMAGINES: "--", FREE: ":"}
    colors = {agent: f"C{i}" for i, agent in enumerate(KINDS)}
    for line, task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        for axes, axis, unit in zip(line, ("step", "seconds"), (1, 60), strict=True):
            drawn = set()
            for one in (one for one in result["cells"] if one["task"] == task):
                name = one["agent"]
                axes.plot(
                    [point[axis] / unit for point in one["points"]], [point["return"] for point in one["points"]],
                    styles[KINDS[name]], color=colors[name], marker="o", markersize=3,
                    label=None if name in drawn else f"{name} ({KINDS[name]})",
                )  # fmt: skip
                drawn.add(name)
            axes.set(xscale="log", xlabel={"step": "env steps", "seconds": "minutes of CPU time"}[axis], title=task)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        line[0].set_ylabel("return")
        line[1].legend(frameon=False, fontsize=7)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def run(wanted: Sequence[tuple[str, str, int, float]], limit: float, report: Callable[[str], None]) -> None:
    """Run the cells that are missing, each in a process of its own; write the JSON after each."""
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    began = time.monotonic()
    for one in wanted:
        if one in trained(load()):
            continue
        if time.monotonic() - began > 60 * limit:
            report("the limit is reached: start it again for the rest")
            return
        command = [sys.executable, __file__, "--cell", *map(str, one)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            report(f"{one} failed")
            continue
        found = {**json.loads(done.stdout.splitlines()[-1]), "instructions": bench.instructions()}
        others = [c for c in load() if key(c) != one]
        checkpoint.write_atomic(FILE, json.dumps(document([*others, found]), indent=1) + "\n")
        report(json.dumps({name: value for name, value in found.items() if name != "points"}))


def main() -> None:
    """Run what is missing; write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=float, default=float("inf"), help="minutes after which no cell begins")
    parser.add_argument("--page", action="store_true", help="only write the page and the picture")
    parser.add_argument("--train-noise", type=float, nargs="+", help="only agents that imagine, with noise in training")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        task, agent, seed, noise = given.cell
        print(json.dumps(cell(task, agent, int(seed), train_noise=float(noise))))
        return
    if given.train_noise and not min(given.train_noise) > 0:
        parser.error(f"--train-noise must be above 0, not {min(given.train_noise):g}.")
    if not given.page:
        wanted = [
            (task, agent, seed, noise)
            for seed in given.seeds
            for task in given.tasks
            for agent in TASKS[task].agents
            for noise in given.train_noise or (0.0,)
            if agent in given.algorithms and (not noise or KINDS[agent] == IMAGINES)
        ]
        run(wanted, given.limit, lambda text: print(text, flush=True))
    if FILE.is_file():
        write_page()
        draw(json.loads(FILE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
