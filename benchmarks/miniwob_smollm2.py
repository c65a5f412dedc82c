"""SmolLM2-135M on ten web pages: imitation of 13 episodes a page, then GRPO or PPO. results/miniwob-smollm2.json.

python benchmarks/miniwob_smollm2.py                # the runs of `foresight reproduce agents`
python benchmarks/miniwob_smollm2.py --only ppo     # evaluate one of them; the other figures stay

Every run is evaluated on the same held-out episodes of ten pages of MiniWoB++, six of one click and four of two to five
steps, greedily. `imitation_100` is imitation of 100 episodes a page, without GRPO. Scores are raw rewards, at least 0;
those of a tier are shares of the oracle's (results/miniwob.json).
Controls of the model after GRPO: tasks whose words are those of another episode, and four pages not trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "reproduce"
FILE = ROOT / "results" / "miniwob-smollm2.json"
NAMES = {
    "imitation": "sft-smollm2-miniwob-few",
    "grpo": "grpo-smollm2-miniwob",
    "ppo": "rlhf_ppo-smollm2-miniwob",
    "imitation_100": "sft-smollm2-miniwob",
}
EPISODES = 200
CONTROLS = {"shuffled": ("ten", True), "held_out": ("held-out", False)}
Pages = dict[str, float]


def scores(agent: Any, episodes: int, **options: Any) -> Pages:
    """The mean outcome of each page, over `episodes` held-out episodes in all."""
    from foresight.runtime import environments

    given = agent.settings
    agent.settings = dataclasses.replace(given, env_options={**given.env_options, **options})
    agent.env = environments.single(agent.settings)
    measured = agent.evaluate(episodes).extra_metrics
    agent.settings = given
    prefix = "outcome/"
    return {name.removeprefix(prefix): value for name, value in measured.items() if name.startswith(prefix)}


def tiers(pages: Pages, oracle: Pages) -> Pages:
    """The share of the oracle's score on the pages of one click, and on those of a few steps."""
    from foresight.envs.tools import web

    named = {"one_click": web.ONE_CLICK, "few_steps": web.FEW_STEPS}
    return {name: sum(pages[p] for p in some) / sum(oracle[p] for p in some) for name, some in named.items()}


def others(known: Mapping[str, Any], only: Iterable[str], episodes: int, seed: int) -> dict[str, Any]:
    """The result that `--only` adds to; none if all are evaluated. Exits if its figures are of something else."""
    missing = [name for name in NAMES if name not in set(only)]
    if not missing:
        return {}
    if any(name not in known for name in missing):
        sys.exit(f"The other figures are not there: {', '.join(missing)}. Leave out --only.")
    if (known["episodes"], known["seeds"]) != (episodes, [seed]):
        sys.exit(
            f"The other figures are of {known['episodes']} episodes and seed {known['seeds'][0]}, not of {episodes} "
            f"and {seed}. Leave out --only, or give the same."
        )
    return dict(known)


def command(episodes: int, seed: int) -> str:
    """What makes the whole file."""
    parts = [] if episodes == EPISODES else ["--episodes", str(episodes)]
    parts += [] if seed == 0 else ["--seed", str(seed)]
    return shlex.join(["python", "benchmarks/miniwob_smollm2.py", *parts])


def main() -> None:
    """Evaluate, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of each evaluation, at most 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="evaluate only these")
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime import run as runs

    torch.set_num_threads(1)
    began, oracle = time.monotonic(), json.loads((ROOT / "results" / "miniwob.json").read_text())["bounds"]["oracle"]
    oracle = {name.removeprefix("MiniWoB/"): value for name, value in oracle.items()}
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    document = others(known, given.only, given.episodes, given.seed)
    document |= {
        "what": "SmolLM2 on ten pages of MiniWoB++: imitation of 13 episodes of the oracle a page, then GRPO or PPO",
        "command": command(given.episodes, given.seed),
        "seeds": [given.seed],
        "episodes": given.episodes,
    }
    found: dict[str, Pages] = {}
    for kind in given.only:
        name = NAMES[kind]
        if not (RUNS / f"{name}-{given.seed}" / "summary.json").is_file():
            sys.exit("A run is missing: foresight reproduce agents --only miniwob-smollm2")
        agent = runs.load(RUNS / f"{name}-{given.seed}")
        found[kind] = scores(agent, given.episodes)
        if kind == "grpo":
            for control, (pages, shuffled) in CONTROLS.items():
                agent.settings = dataclasses.replace(agent.settings, env=f"miniwob:{pages}")
                found[control] = scores(agent, given.episodes // 2, shuffled=shuffled)
        agent.close()
        print(kind, found[kind], flush=True)
    for kind, scored in found.items():
        document[kind] = {"pages": scored, "mean": statistics.fmean(scored.values())}
        if kind != "held_out":
            document[kind] |= tiers(scored, oracle)
    for kind in ("grpo", "ppo"):
        gained = {page: document[kind]["pages"][page] - value for page, value in document["imitation"]["pages"].items()}
        document |= {
            f"{kind}_gained": gained,
            f"{kind}_20_points_above_imitation": sum(value >= 0.2 for value in gained.values()),
        }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()
