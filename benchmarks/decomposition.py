"""Learned decomposition: when a manager splits a chain among sub-agents: results/decomposition.json.

python benchmarks/decomposition.py                  # seed 0, about 5 minutes of a core
python benchmarks/decomposition.py --seeds 0 1 2

A decoder of 0.1 million parameters is pretrained on scripted conversations that split half of the chains at random,
then trained by GRPO on the outcome less the cost of all sampled tokens (presets `delegation` of pretrain and grpo).
Chains have 3 to 24 terms; one context holds an answer of 12. Compared on new chains of every length:

- `learned`: the trained manager, which splits or does not;
- `one`: the same model as one agent, which gets at least as many sampled tokens: the most frequent of several answers,
  as many as the tokens of `learned` at that length pay for, rounded up;
- `split`: the same model where every chain is halved;
- `before`: the manager before GRPO, sampled.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "decomposition.json"
EACH = 20  # chains of each length
FITS = 12  # terms whose answer fits into one context


def chains(seed: int, trained: set[str]) -> list[str]:
    """Chains of every length that were not trained on."""
    import random

    draw, found = random.Random(f"decomposition {seed}"), dict[str, None]()
    for length in range(3, 25):
        count = 0
        while count < EACH:
            digits = "".join(str(draw.randint(0, 9)) for _ in range(length))
            if digits not in trained and digits not in found:
                found[digits], count = None, count + 1
    return list(found)


def held(policy: Any, episodes: list[Any], turn: int, temperature: float = 0.0, seed: int = 0) -> None:
    """Hold the conversations of these episodes, to their end."""
    import torch

    from foresight.envs.text.task import Example, TextTask
    from foresight.planning.generation import multi_turn

    left = list(episodes)
    task = TextTask("delegation", (), (), None, episode=lambda example: left.pop(0), turns=3)
    generator = torch.Generator().manual_seed(seed)
    multi_turn.converse(policy, task, [Example("")] * len(episodes), 1, turn, temperature, generator)


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over chains, and by length."""

    def means(few: list[dict[str, float]]) -> dict[str, float]:
        return {key: round(sum(row[key] for row in few) / len(few), 4) for key in few[0] if key != "terms"}

    long = [row for row in rows if row["terms"] > FITS]
    short = [row for row in rows if row["terms"] <= FITS]
    lengths = sorted({row["terms"] for row in rows})
    by_length = {str(int(n)): means([row for row in rows if row["terms"] == n]) for n in lengths}
    return {**means(rows), "short": means(short), "long": means(long), "by_length": by_length}


def row(episode: Any, **other: float) -> dict[str, float]:
    """What is measured of one chain."""
    parts = episode.parts()
    split = float(parts["members"] > 0)
    return {"terms": len(episode.digits), "right": parts["outcome"], "tokens": parts["team_tokens"],
            "split": split, "members": parts["members"], **other}  # fmt: skip


def managed(policy: Any, digits: list[str], turn: int, temperature: float = 0.0) -> list[dict[str, float]]:
    """The manager, with sub-agents."""
    from foresight.envs.tools.delegation import Delegation

    episodes = [Delegation(one, depth=1, budget=1_000) for one in digits]
    held(policy, episodes, turn, temperature)
    return [row(one) for one in episodes]


def alone(policy: Any, digits: list[str], turn: int, budget: dict[str, float]) -> list[dict[str, float]]:
    """One agent that votes, with at least as many tokens a chain of that length as the team had."""
    from foresight.envs.tools.delegation import Delegation

    greedy = [Delegation(one, budget=1_000) for one in digits]
    held(policy, greedy, turn)
    cost = summary([row(one) for one in greedy])["by_length"]
    counts = [math.ceil(budget[str(len(one))] / cost[str(len(one))]["tokens"] - 1e-6) for one in digits]
    sampled = [Delegation(one, budget=1_000) for one, n in zip(digits, counts, strict=True) for _ in range(n)]
    held(policy, sampled, turn, 1.0)
    found = []
    for one, count, first in zip(digits, counts, greedy, strict=True):
        few, sampled = sampled[:count], sampled[count:]
        votes = collections.Counter(each.answer for each in few if each.answer)
        answer = votes.most_common(1)[0][0] if votes else ""
        right = float(answer == str(sum(map(int, one)) % 10))
        tokens = float(sum(each.tokens for each in few))
        found.append({"terms": len(one), "right": right, "tokens": tokens, "answers": float(count),
                      "greedy": first.parts()["outcome"]})  # fmt: skip
    return found


def halved(policy: Any, digits: list[str], turn: int) -> list[dict[str, float]]:
    """The same model where every chain is halved."""
    from foresight.envs.tools.delegation import LETTERS, Delegation

    workers = [
        Delegation(half, budget=1_000) for one in digits for half in (one[: len(one) // 2], one[len(one) // 2 :])
    ]
    held(policy, workers, turn)
    episodes = []
    for number, one in enumerate(digits):
        episode, middle = Delegation(one, depth=1, budget=1_000), len(one) // 2
        text = f"?a-{LETTERS[middle - 1]}?{LETTERS[middle]}-{LETTERS[len(one) - 1]}"
        opening = episode.messages()
        episode.spend(len(text) + 1)
        episode.turn(text)
        episode.members = episode.latest = workers[2 * number : 2 * number + 2]
        reply = episode.joined().message
        messages = [*opening, {"role": "assistant", "content": text}, reply]
        episode.messages = lambda messages=messages: messages
        episodes.append(episode)
    held(policy, episodes, 20)  # 11 are enough for the sum of two results
    return [row(one) for one in episodes]


def trained(seed: int) -> dict[str, Any]:
    """One seed: pretraining, GRPO, and the comparison."""
    from foresight.algorithms.language import grpo, pretrain
    from foresight.envs.make import make
    from foresight.runtime import catalog
    from foresight.training.options import build_config

    began = time.monotonic()
    first, second = (catalog.presets(name)["delegation"] for name in ("pretrain", "grpo"))
    env = make("delegation", "text", **second.get("env_options", {}))
    reserved = {"task", "env_options", "evaluation", "source"}
    settings = [{key: value for key, value in one.items() if key not in reserved} for one in (first, second)]
    config = build_config(pretrain.Config, **{**settings[0], "seed": seed})
    for step, metrics, state in pretrain.train(config, env):  # noqa: B007
        if step % 200 == 0:
            print(
                f"seed {seed} pretrain {step} loss {metrics['loss']:.3f} {time.monotonic() - began:.0f} s", flush=True
            )
    digits = chains(seed, {example.columns["row"]["digits"] for example in env.train})
    turn = config.max_new_tokens
    found: dict[str, Any] = {"before": summary(managed(state.policy, digits, turn, 1.0))}
    with tempfile.TemporaryDirectory() as folder:
        model = pretrain.export(state, folder)
        config = build_config(grpo.Config, **{**settings[1], "seed": seed, "model": str(model)})
        curve = []
        for step, metrics, after in grpo.train(config, env):  # noqa: B007
            curve.append({key: round(metrics[key], 4) for key in ("outcome", "reward", "members", "team_tokens")})
            if step % 10 == 0:
                print(f"seed {seed} grpo {step} {curve[-1]} {time.monotonic() - began:.0f} s", flush=True)
    found["learned"] = summary(managed(after.policy, digits, turn))
    budget = {n: one["tokens"] for n, one in found["learned"]["by_length"].items()}
    found["one"] = summary(alone(after.policy, digits, turn, budget))
    found["split"] = summary(halved(after.policy, digits, turn))
    return {**found, "curve": curve[::5], "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Train and compare, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    runs = {str(seed): trained(seed) for seed in given.seeds}

    def mean(*path: str) -> float:
        values = []
        for run in runs.values():
            value: Any = run
            for key in path:
                value = value[key]
            values.append(value)
        return round(sum(values) / len(values), 4)

    document = {
        "what": "Chains of 3 to 24 terms: a manager that learned to delegate, and one agent at equal sampled tokens",
        "command": shlex.join(["python", "benchmarks/decomposition.py", *sys.argv[1:]]),
        "seeds": given.seeds,
        "chains": EACH * 22,
        "learned": mean("learned", "right"),
        "one": mean("one", "right"),
        "split": mean("split", "right"),
        "before": mean("before", "right"),
        "gain": round(mean("learned", "right") - mean("one", "right"), 4),
        "least_gain": round(min(run["learned"]["right"] - run["one"]["right"] for run in runs.values()), 4),
        "delegated_short": mean("learned", "short", "split"),
        "delegated_long": mean("learned", "long", "split"),
        "tokens": {name: mean(name, "tokens") for name in ("learned", "one", "split", "before")},
        "runs": runs,
        "seconds": sum(run["seconds"] for run in runs.values()),
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    checkpoint.write_atomic(FILE, json.dumps(document, indent=2) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "runs"}, indent=2))


if __name__ == "__main__":
    main()
