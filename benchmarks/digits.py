"""Digits: logistic regression and the runs of `classifier` on the same split: results/classifier-digits-compared.json.

python benchmarks/digits.py                    # every seed of `foresight reproduce sequence`
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "classifier-digits-compared.json"
RUNS = ROOT / "runs" / "reproduce"
NETWORKS = {
    "vit": "classifier-digits",
    "no_positions": "classifier-digits-no-positions",
    "swin": "classifier-digits-swin",
}


def logistic_regression() -> float:
    """The accuracy on the held-out images, with scikit-learn's default penalty, of pixels scaled to [0, 1]."""
    from sklearn.linear_model import LogisticRegression

    from foresight.envs.images.make import make

    env = make("digits")
    model = LogisticRegression(max_iter=5_000)
    model.fit(env.train.flatten(1).numpy() / 255, env.train_label.numpy())
    return float(model.score(env.test.flatten(1).numpy() / 255, env.test_label.numpy()))


def main() -> None:
    """Read the runs, fit the baseline, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    from foresight.runtime import bench

    began = time.monotonic()
    found = {
        name: {
            run.name.removeprefix(f"{row}-"): json.loads((run / "summary.json").read_text())["evaluation"]["mean"]
            for run in sorted(RUNS.glob(f"{row}-?"))
            if (run / "summary.json").is_file()
        }
        for name, row in NETWORKS.items()
    }
    if not all(found.values()):
        sys.exit(f"Runs are missing: foresight reproduce sequence --only {' '.join(NETWORKS.values())}")
    baseline = logistic_regression()
    means = {name: statistics.fmean(seeds.values()) for name, seeds in found.items()}
    document = {
        "what": "classifiers of scikit-learn's digits on the same 359 held-out images",
        "command": shlex.join(["python", "benchmarks/digits.py", *sys.argv[1:]]),
        "seeds": sorted(int(seed) for seed in found["vit"]),
        "accuracy": found,
        "means": means,
        "logistic_regression": baseline,
        "vit_above_logistic_regression": min(found["vit"].values()) > baseline,
        "positions_help": min(found["vit"].values()) > max(found["no_positions"].values()),
    }
    bench.record(FILE, document, began)
    print(json.dumps({**means, "logistic_regression": baseline}, indent=2))


if __name__ == "__main__":
    main()
