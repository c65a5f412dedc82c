"""Errors of open-loop predictions by horizon: RSSM, STORM's transformer and an LSTM in its place.

python benchmarks/open_loop.py                                  # runs what is missing in results/open-loop.json
python benchmarks/open_loop.py --envs KeyDoor-v0 --models rssm --seeds 3

A cell is one model, trained with one seed on recorded data of an environment. All models of a seed have the same data
of the same scripted, half random behavior, about as many parameters, the same optimizer, and as many updates on as many
sequences (`SETTINGS`); each has the loss of its algorithm. Then each observes 5 steps of held-out sequences and
predicts the next 20 from the actions alone (`runtime.evaluation.open_loop`). `repeat` is the prediction that nothing
changes: the last observation, and the mean reward of the data. A stopped benchmark resumes when it is started again;
`--limit` is the number of minutes after which no further cell begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "open-loop.json"
MODELS = ("rssm", "transformer", "lstm")
NUM_ENVS = 8  # recorded at once
LENGTH = 32  # rows of a sequence
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 100.0
HELD_OUT, CONTEXT, HORIZON = 256, 5, 20  # sequences to predict, observed and predicted steps
SHOWN = (1, 5, 10, 20)  # predicted steps that are reported by name
ERRORS = ("observation", "reward", "continuation")


def balance(obs: Tensor, generator: torch.Generator) -> Tensor:
    """Actions for CartPole: half of them random, half toward the side to which the pole falls."""
    falls = (obs[:, 2] + 0.5 * obs[:, 3] > 0).long()
    chance = torch.rand(2, len(obs), generator=generator)
    return torch.where(chance[0] < 0.5, (chance[1] < 0.5).long(), falls)


def swing(obs: Tensor, generator: torch.Generator) -> Tensor:
    """Actions for Pendulum: half of them random, half with the motion."""
    chance = torch.rand(2, len(obs), 1, generator=generator)
    return torch.where(chance[0] < 0.5, 4 * chance[1] - 2, 2 * obs[:, 2:].sign())


def seek(obs: Tensor, generator: torch.Generator) -> Tensor:
    """Actions for KeyDoor: half of them random, half toward the goal, or else the key, if one is among the cells seen.

    Colors are read at the middle of each of the 5 × 5 cells.
    """
    middle = 8 + 12 * torch.arange(5)
    seen = obs[:, middle][:, :, middle].int()  # [B, 5, 5, 3]
    goal, key = ((seen - torch.tensor(color)).abs().sum(-1) < 30 for color in ((40, 190, 70), (240, 210, 40)))
    key[:, 2, 2] = False  # the agent that holds it
    worth = (2 * goal.int() + key.int()).flatten(1)
    best = worth.argmax(1)
    down, right = best // 5 - 2, best % 5 - 2
    chance = torch.rand(3, len(obs), generator=generator)
    across = chance[2] * (down.abs() + right.abs()) < right.abs()
    toward = torch.where(across, torch.where(right > 0, 0, 2), torch.where(down > 0, 3, 1))
    random = (4 * chance[1]).long().clamp(max=3)
    return torch.where((chance[0] < 0.5) | (worth.amax(1) == 0), random, toward)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the models of one environment are compared."""

    behave: Callable[[Tensor, torch.Generator], Tensor]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the environment
    steps: int = 20_000  # recorded env steps to train on
    updates: int = 400
    batch: int = 16  # sequences per update
    common: dict[str, Any] = dataclasses.field(default_factory=lambda: {"groups": 8, "classes": 8, "units": 64})
    rssm: dict[str, Any] = dataclasses.field(default_factory=lambda: {"deter": 92, "hidden": 46})
    storm: dict[str, Any] = dataclasses.field(default_factory=lambda: {"width": 64})


SETTINGS = {
    "CartPole-v1": Setting(balance, updates=1_600),
    "Pendulum-v1": Setting(swing),
    # Small rooms: the behavior finds the goal often, so there are rewards to predict.
    "KeyDoor-v0": Setting(
        seek,
        {"size": 3},
        10_000,
        2_000,
        8,
        {"groups": 16, "classes": 16, "units": 64, "depth": 8, "patch": 8, "decoded": 8},
        {"deter": 184, "hidden": 92},
        {"width": 128},
    ),
}


def record(name: str, steps: int, seed: int) -> tuple[Any, Any]:
    """The spaces of the environment, and a Rollout of the scripted behavior with `steps` steps altogether."""
    from foresight.envs import collect
    from foresight.envs.base import Episodes
    from foresight.envs.make import make
    from foresight.nets.models import latent_actor

    env = make(name, num_envs=NUM_ENVS, **SETTINGS[name].options)
    generator = torch.Generator().manual_seed(seed)

    def choose(obs: Any, carry: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
        action = SETTINGS[name].behave(obs, generator)
        return action, {"action": latent_actor.features_of(env.spaces.action, action)}, carry

    rollout = collect.segment(
        env, env.reset(seed), choose, steps // NUM_ENVS, torch.device("cpu"), Episodes(), terminal=True
    )
    return env.spaces, rollout


def build(name: str, kind: str, spaces: Any, seed: int) -> Any:
    """The State of an algorithm with this model, with about as many weights as the others."""
    from foresight.algorithms.world import dreamer, storm

    what = SETTINGS[name]
    common = {"seed": seed, "layers": 2, "replay_size": 1_000, "batch_size": what.batch, "sequence_length": LENGTH}
    common |= what.common
    if kind == "rssm":
        return dreamer.build(dreamer.Config(**common, **what.rssm, blocks=1), spaces)
    return storm.build(storm.Config(**common, **what.storm, sequence_model=kind, heads=4, dropout=0.0), spaces)


def parameters(model: torch.nn.Module) -> int:
    """The number of weights."""
    return sum(p.numel() for p in model.parameters())


def train(state: Any, rollout: Any, seed: int, updates: int) -> list[float]:
    """Train the model on the recorded steps; returns the loss of every update."""
    from foresight.data.sequences import Sequences, arrivals
    from foresight.envs import collect
    from foresight.training import optim

    data = Sequences(2 * rollout.trajectory.reward.numel(), NUM_ENVS)
    collect.add_sequences(data, rollout)
    model, config = state.model, state.config
    size = config.batch_size
    coefs = {"dynamics": config.dynamics_coef, "representation": config.representation_coef}
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    sampler, losses = torch.Generator().manual_seed(seed), []
    for _ in range(updates):
        batch = data.sample(size, LENGTH, sampler)
        batch = batch.replace(action=batch.extras["action"], discount=config.gamma * batch.discount)
        terms, _ = model.loss(model.initial(size), batch, arrivals(batch), state.generator)
        loss = torch.stack([coefs.get(name, 1.0) * term.mean() for name, term in terms.items()]).sum()
        optim.descend(optimizer, loss.backward, MAX_GRAD_NORM)
        losses.append(float(loss.detach()))
    return losses


def predicted(model: Any, gamma: float, spaces: Any, rollout: Any, reward: float, seed: int) -> dict[str, Any]:
    """Errors of the model and of `repeat` by predicted step, from 1 on, in held-out sequences."""
    from foresight.runtime.evaluation import open_loop

    length = CONTEXT + HORIZON
    rows = rollout.trajectory.map(lambda x: x.unflatten(1, (-1, length)).flatten(0, 1))
    state: Any = SimpleNamespace(model=model, config=SimpleNamespace(gamma=gamma))
    found = open_loop.predict(state, spaces.action, rows, CONTEXT, torch.Generator().manual_seed(seed))
    assert found.truth is not None
    last = found.truth[:, CONTEXT - 1 : CONTEXT].expand_as(found.truth)
    repeat = dataclasses.replace(
        found, prediction=last, predicted_reward=torch.full_like(found.reward, reward),
        predicted_discount=torch.ones_like(found.discount),
    )  # fmt: skip
    return {
        name: {key: [round(x, 6) for x in values[1:]] for key, values in one.errors().items()}
        for name, one in (("model", found), ("repeat", repeat))
    }


def cell(name: str, kind: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one model."""
    began = time.perf_counter()
    what = SETTINGS[name]
    spaces, recorded = record(name, what.steps, seed)
    _, held_out = record(name, HELD_OUT * (CONTEXT + HORIZON), 1_000 + seed)
    state = build(name, kind, spaces, seed)
    losses = train(state, recorded, seed, what.updates)
    if not math.isfinite(losses[-1]):
        raise ValueError(f"{name}, {kind}, seed {seed}: the loss is {losses[-1]}")
    mean = float(recorded.trajectory.reward.mean())
    errors = predicted(state.model, state.config.gamma, spaces, held_out, mean, seed)
    return {
        "env": name, "model": kind, "seed": seed, "parameters": parameters(state.model), "updates": what.updates,
        "loss": round(statistics.fmean(losses[-50:]), 4), "errors": errors["model"], "repeat": errors["repeat"],
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def load() -> list[dict[str, Any]]:
    """The cells so far."""
    return list(json.loads(FILE.read_text(encoding="utf-8"))["cells"]) if FILE.is_file() else []


def key(found: dict[str, Any]) -> tuple[str, str, int]:
    """The identity of a cell."""
    return found["env"], found["model"], found["seed"]


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors by env, model and kind: at the steps `SHOWN`, the mean over seeds, and the range over seeds."""
    found: dict[str, Any] = {}
    for name in sorted({c["env"] for c in cells}):
        of_env = [c for c in cells if c["env"] == name]
        groups = {kind: [c["errors"] for c in of_env if c["model"] == kind] for kind in MODELS}
        groups["repeat"] = [c["repeat"] for c in of_env if c["model"] == of_env[0]["model"]]
        for kind, errors in groups.items():
            for error in ERRORS if errors else ():
                for step in SHOWN:
                    values = [one[error][step - 1] for one in errors]
                    place = found.setdefault(name, {}).setdefault(kind, {})
                    place[f"{error}_{step}"] = round(statistics.fmean(values), 6)
                    place[f"{error}_{step}_range"] = [min(values), max(values)]
    return found


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of these cells."""
    from foresight.runtime import bench

    every: dict[tuple[str, str], set[int]] = {}
    for c in cells:
        every.setdefault((c["env"], c["model"]), set()).add(c["seed"])
    return {
        "what": "errors of open-loop predictions by horizon: RSSM, transformer and LSTM of equal size",
        "command": " ".join(
            ["python benchmarks/open_loop.py --envs", *sorted({c["env"] for c in cells}), "--seeds"]
            + [str(seed) for seed in sorted({c["seed"] for c in cells})]
        ),
        "seeds": sorted(set.intersection(*every.values())),
        "errors": summary(cells),
        "seconds": round(sum(c["seconds"] for c in cells), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "cells": sorted(cells, key=key),
    }


def main() -> None:
    """Run the cells that are missing; write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=math.inf, help="minutes after which no cell begins")
    given = parser.parse_args()

    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    wanted = [(name, kind, seed) for name in given.envs for seed in given.seeds for kind in given.models]
    for one in wanted:
        if one in map(key, load()):
            continue
        if time.monotonic() - began > 60 * given.limit:
            break
        found = cell(*one)
        checkpoint.write_atomic(FILE, json.dumps(document([*load(), found]), indent=1) + "\n")
        print({name: value for name, value in found.items() if name not in ("errors", "repeat")}, flush=True)


if __name__ == "__main__":
    main()
