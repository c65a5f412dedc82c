"""Errors of open-loop predictions by horizon: RSSM, STORM's transformer and an LSTM in its place.

python benchmarks/open_loop.py                                  # runs what is missing in results/open-loop.json
python benchmarks/open_loop.py --envs CartPole-v1 --models rssm --seeds 3

A cell is one model, trained with one seed on recorded data of an environment. All models of a seed have the same data
of the same scripted, half random behavior, about as many parameters, the same optimizer, and as many updates on as many
sequences; each has the loss of its algorithm. Then each observes 5 steps of held-out sequences and predicts the next 20
from the actions alone (`runtime.evaluation.open_loop`). `repeat` is the prediction that nothing changes: the last
observation, and the mean reward of the data. A stopped benchmark resumes when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
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
STEPS, NUM_ENVS = 20_000, 8  # recorded env steps to train on, and environments
UPDATES, BATCH, LENGTH = 400, 16, 32  # sequences per update, and their rows
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


ENVS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {"CartPole-v1": balance, "Pendulum-v1": swing}


def record(name: str, steps: int, seed: int) -> tuple[Any, Any]:
    """The spaces of the environment, and a Rollout of the scripted behavior with `steps` steps altogether."""
    from foresight.envs import collect
    from foresight.envs.base import Episodes
    from foresight.envs.make import make
    from foresight.nets.models import latent_actor

    env = make(name, num_envs=NUM_ENVS)
    generator = torch.Generator().manual_seed(seed)

    def choose(obs: Any, carry: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
        action = ENVS[name](obs, generator)
        return action, {"action": latent_actor.features_of(env.spaces.action, action)}, carry

    rollout = collect.segment(
        env, env.reset(seed), choose, steps // NUM_ENVS, torch.device("cpu"), Episodes(), terminal=True
    )
    return env.spaces, rollout


def build(kind: str, spaces: Any, seed: int) -> Any:
    """The State of an algorithm with this model, about 130,000 weights."""
    from foresight.algorithms.world import dreamer, storm

    common: dict[str, Any] = {"seed": seed, "groups": 8, "classes": 8, "units": 64, "layers": 2, "replay_size": 1_000}
    common |= {"batch_size": BATCH, "sequence_length": LENGTH}
    if kind == "rssm":
        return dreamer.build(dreamer.Config(**common, deter=92, hidden=46, blocks=1), spaces)
    return storm.build(storm.Config(**common, sequence_model=kind, width=64, heads=4, dropout=0.0), spaces)


def parameters(model: torch.nn.Module) -> int:
    """The number of weights."""
    return sum(p.numel() for p in model.parameters())


def train(state: Any, rollout: Any, seed: int, updates: int = UPDATES) -> list[float]:
    """Train the model on the recorded steps; returns the loss of every update."""
    from foresight.data.sequences import Sequences, arrivals
    from foresight.envs import collect
    from foresight.training import optim

    data = Sequences(2 * rollout.trajectory.reward.numel(), NUM_ENVS)
    collect.add_sequences(data, rollout)
    model, config = state.model, state.config
    coefs = {"dynamics": config.dynamics_coef, "representation": config.representation_coef}
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    sampler, losses = torch.Generator().manual_seed(seed), []
    for _ in range(updates):
        batch = data.sample(BATCH, LENGTH, sampler)
        batch = batch.replace(action=batch.extras["action"], discount=config.gamma * batch.discount)
        terms, _ = model.loss(model.initial(BATCH), batch, arrivals(batch), state.generator)
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
    spaces, recorded = record(name, STEPS, seed)
    _, held_out = record(name, HELD_OUT * (CONTEXT + HORIZON), 1_000 + seed)
    state = build(kind, spaces, seed)
    losses = train(state, recorded, seed)
    if not math.isfinite(losses[-1]):
        raise ValueError(f"{name}, {kind}, seed {seed}: the loss is {losses[-1]}")
    mean = float(recorded.trajectory.reward.mean())
    errors = predicted(state.model, state.config.gamma, spaces, held_out, mean, seed)
    return {
        "env": name, "model": kind, "seed": seed, "parameters": parameters(state.model), "updates": UPDATES,
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
    parser.add_argument("--envs", nargs="+", choices=tuple(ENVS), default=list(ENVS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()

    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    wanted = [(name, kind, seed) for name in given.envs for seed in given.seeds for kind in given.models]
    for one in wanted:
        if one in map(key, load()):
            continue
        found = cell(*one)
        checkpoint.write_atomic(FILE, json.dumps(document([*load(), found]), indent=1) + "\n")
        print({name: value for name, value in found.items() if name not in ("errors", "repeat")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
