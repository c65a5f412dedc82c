"""Atari 100k on this machine: DreamerV3 of 12M and STORM run end to end from pixels.

STORM has the published sizes but of the image networks, which are smaller.

    python benchmarks/atari100k.py
    python benchmarks/atari100k.py --algorithms storm --games Pong

Every algorithm and game is a run of the preset with `learning_starts` lowered to 100, with one or two
updates (each takes most of a minute of one core), an evaluation of one episode of 100 steps, a video of open-loop
prediction, a checkpoint, and a resumed run with one more update. So the scores say nothing: the result has the seconds
of an update, the environment steps a second of acting, the losses, the peak memory of the process, the size of the
video, and the step from which the run was resumed. Pairs that are in the file already are not run again. It fails
where a peak is above the limit of 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from foresight.runtime import bench
from foresight.runtime.checkpoints import checkpoint

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "atari100k-machine.json"
PRESET = "atari100k"
STARTS = 100  # env steps before the first update
STEPS = {"dreamer": 16, "storm": 0}  # env steps after that: DreamerV3 makes an update in 8 of them, STORM one in each
RESUMED = {"dreamer": 8, "storm": 1}  # env steps of the resumed run
UPDATES = {"dreamer": 3, "storm": 2}  # in all; STORM's first one is at step 100 itself
LIMIT = 8.0  # GiB


def main() -> None:
    """Run the pairs that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=["Pong", "Boxing", "Freeway"])
    parser.add_argument("--algorithms", nargs="+", default=list(STEPS), choices=STEPS)
    options = parser.parse_args()
    done = json.loads(OUT.read_text(encoding="utf-8"))["runs"] if OUT.is_file() else {}
    for algorithm in options.algorithms:
        for game in options.games:
            if f"{algorithm}-{game}" not in done:
                done[f"{algorithm}-{game}"] = measure(algorithm, game)
                write(done)
                print(json.dumps({f"{algorithm}-{game}": done[f"{algorithm}-{game}"]}), flush=True)
    if above := over_limit(done):
        sys.exit(f"Above the limit of {LIMIT:g} GiB: {', '.join(above)}. --decoded lowers that of an update.")


def over_limit(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The runs whose peak memory is above their limit, with that peak."""
    return [f"{name} {run['peak_gib']} GiB" for name, run in runs.items() if run["peak_gib"] > run["limit_gib"]]


def measure(algorithm: str, game: str) -> dict[str, Any]:
    """Train, record and resume; the figures."""
    out = ROOT / "runs" / "atari100k-machine" / f"{algorithm}-{game}-{int(time.time())}"
    steps = STARTS + STEPS[algorithm]
    first, peak = foresight(
        "train", algorithm, "--preset", PRESET, "--env", f"ALE/{game}-v5", "--steps", steps,
        "--learning-starts", STARTS, "--env-options", "time_limit=100", "--evaluation-episodes", 1, "--threads", 1,
        "--record", "--out", out,
    )  # fmt: skip
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    videos = list((out / "media").glob("open-loop*.mp4"))
    more, peak_resumed = foresight("resume", out, "--steps", steps + RESUMED[algorithm])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    profile = json.loads((out / "summary.json").read_text(encoding="utf-8"))["profile"]
    trained = [row for row in rows if "reconstruction" in row][-1]
    losses = {key: x for key, x in trained.items() if isinstance(x, float) and "/" not in key and key != "seconds"}
    return {
        "env_steps": rows[-1]["step"],
        "updates": UPDATES[algorithm],
        "seconds_per_update": round(profile["learning"] / UPDATES[algorithm], 2),
        "acting_steps_per_second": round(rows[-1]["step"] / (profile["environment"] + profile["inference"]), 2),
        "losses": {key: round(value, 5) for key, value in losses.items()},
        "peak_gib": round(max(peak, peak_resumed), 2),
        "limit_gib": LIMIT,
        "video_bytes": sum(video.stat().st_size for video in videos),
        "resumed_from": summary["steps"],
        "checkpoint_bytes": sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file()),
        "seconds": round(first + more, 1),
    }


def foresight(*words: Any) -> tuple[float, float]:
    """Run a command; its seconds and its peak memory in GiB."""
    from foresight.runtime import machine

    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "foresight", *map(str, words)], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"foresight {' '.join(map(str, words))} failed.")
    return time.perf_counter() - began, machine.peak_gib(usage)


def write(runs: dict[str, Any]) -> None:
    """Write the result."""
    document = {
        "what": "Atari 100k from pixels, DreamerV3 of 12M and STORM: a few updates of each, on this machine",
        "command": "python benchmarks/atari100k.py",
        "seeds": [0],
        "learning_starts": STARTS,
        "runs": runs,
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(sum(run["seconds"] for run in runs.values()), 1),
    }
    checkpoint.write_atomic(OUT, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
