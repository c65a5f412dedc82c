"""Generated states a second of compiled breadth-first search, the duplicate check included, in the seven domains.

    python benchmarks/pddl_speed.py        # writes results/pddl-speed.json

The median of five searches of at most 300,000 states; a domain whose problem has fewer states is searched whole.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from foresight.envs.pddl import domains
from foresight.envs.pddl.ground import ground
from foresight.planning.symbolic.search import search
from foresight.runtime import bench

SIZES = {"delivery": 14, "ferry": 6, "forest": 60, "gripper": 6, "heavy": 12, "miconic": 10, "spanner": 8}
ROUNDS, MOST = 5, 300_000


def main() -> None:
    began, rates, generated = time.perf_counter(), {}, {}
    for name, size in SIZES.items():
        task = ground(domains.of_size(name, size))
        search(task, "bfs", max_states=1000)  # compiles
        found = [search(task, "bfs", seconds=60.0, max_states=MOST) for _ in range(ROUNDS)]
        rates[name], generated[name] = round(statistics.median(one.rate for one in found)), found[0].generated
    document = {
        "what": "generated states a second of compiled breadth-first search", "seeds": [0],
        "command": "python benchmarks/pddl_speed.py", "states_a_second": rates, "generated": generated,
        "least_rate": min(rates.values()), "versions": bench.versions(), "machine": bench.machine(),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    Path("results/pddl-speed.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
