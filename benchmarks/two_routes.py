"""Which side policies take around the obstacle of TwoRoutes-v0, and how often they hit it: results/two-routes.json.

python benchmarks/two_routes.py                    # every seed of `foresight reproduce sequence`
python benchmarks/two_routes.py --episodes 100
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "two-routes.json"
RUNS = ROOT / "runs" / "reproduce"
ALGORITHMS = ("behavior_cloning", "act", "diffusion_policy")


def routes(run: Path, episodes: int) -> dict[str, float]:
    """The shares of `episodes` that reach the goal on the left, on the right, and that hit the obstacle."""
    import torch

    from foresight.envs.make import make
    from foresight.runtime import run as runs

    agent, env = runs.load(run), make("TwoRoutes-v0", num_envs=episodes)
    obs, carry = env.reset(10_000), None
    side, over, counts = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.bool), [0, 0, 0]
    while not over.all():
        action, _, carry = agent.module.act(agent.state, obs, carry)
        feedback = env.step(action)
        low = feedback.final_obs[:, 1] < 0.1
        side = torch.where(low & ~over, feedback.final_obs[:, 0], side)  # the last one before the obstacle is passed
        for i, hit in enumerate(((feedback.reward > 0) & (side < 0), (feedback.reward > 0) & (side > 0))):
            counts[i] += int((hit & ~over).sum())
        counts[2] += int(((feedback.reward < 0) & ~over).sum())
        over |= feedback.cut > 0
        carry = carry if carry is None else agent.module.reset_carry(carry, feedback.cut)
        obs = feedback.obs
    agent.close()
    return dict(zip(("left", "right", "collisions"), (count / episodes for count in counts), strict=True))


def main() -> None:
    """Measure every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=300)
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    shares: dict[str, dict[str, Any]] = {}
    for name in ALGORITHMS:
        found = [path for path in sorted(RUNS.glob(f"{name}-TwoRoutes-v0-[0-9]")) if (path / "summary.json").is_file()]
        for path in (path for path in found if re.fullmatch(r".*-\d+", path.name)):
            shares.setdefault(name, {})[path.name.rpartition("-")[2]] = routes(path, given.episodes)
            print(path.name, shares[name][path.name.rpartition("-")[2]], flush=True)
    if not shares:
        sys.exit("There is no run: foresight reproduce sequence --only two-routes")
    document = {
        "what": "TwoRoutes-v0: shares of episodes that pass on the left, on the right, and that hit the obstacle",
        "command": shlex.join(["python", "benchmarks/two_routes.py", *sys.argv[1:]]),
        "seeds": sorted({int(seed) for seeds in shares.values() for seed in seeds}),
        "episodes": given.episodes,
        "shares": shares,
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    for name, seeds in shares.items():
        document[f"{name}_collisions"] = statistics.fmean(one["collisions"] for one in seeds.values())
        document[f"{name}_rarer_side"] = min(min(one["left"], one["right"]) for one in seeds.values())
    document["seconds"] = round(time.monotonic() - began, 1)
    checkpoint.write_atomic(FILE, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
