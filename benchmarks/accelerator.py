"""World models on an accelerator: updates as CUDA graphs compared with plain ones, and a training on a game.

    python benchmarks/accelerator.py                         # both algorithms; writes results/accelerator.json
    python benchmarks/accelerator.py --seconds 300 --game Pong

STORM at the published sizes (but of the image networks) and DreamerV3 with 12M parameters, of presets `atari100k`, on
64 × 64 images in color. Of each update the milliseconds by the clock, and those in which kernels run: the rest is the
time that the GPU waits for Python to launch the next one (`waiting`). Then each trains on the game for `seconds`, with
graphs, compiled, in bfloat16, with its replay on the GPU: environment steps a second after the first updates, which
record and compile.
STORM's paper trained at 6.5 a second (102,000 steps in 4.3 hours of an RTX 3090).
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "results" / "accelerator.json"
PUBLISHED = 6.5  # env steps a second of STORM
ROWS, ACTIONS = 2_000, 18
WARM, TIMED = 6, 20  # updates
VARIANTS: dict[str, dict[str, Any]] = {
    "plain float32": {"graph": False},
    "plain bfloat16": {"graph": False, "precision": "bfloat16"},
    "graph float32": {},
    "graph bfloat16": {"precision": "bfloat16"},
    "graph bfloat16 compiled": {"precision": "bfloat16", "compile": True},
}
FASTEST = VARIANTS["graph bfloat16 compiled"]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="Boxing")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each training; 0: none")
    parser.add_argument("--algorithms", nargs="+", default=["storm", "dreamer"], choices=["storm", "dreamer"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("Nothing is measured: this benchmark needs an NVIDIA GPU, and torch sees none.")
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    began = time.perf_counter()
    document: dict[str, Any] = {
        "what": "Updates of world models on an accelerator, plain and as CUDA graphs; a training on a game",
        "command": shlex.join(["python", "benchmarks/accelerator.py", *sys.argv[1:]]),
        "seeds": [0],
        "accelerator": torch.cuda.get_device_name(),
        "updates": {name: {} for name in options.algorithms},
        "training": {},
    }

    def write() -> None:
        document.update(
            versions=bench.versions(), machine=bench.machine(), seconds=round(time.perf_counter() - began, 1)
        )
        checkpoint.write_atomic(options.out, json.dumps(document, indent=2) + "\n")

    for name in options.algorithms:
        for variant in options.variants:
            document["updates"][name][variant] = updates(name, VARIANTS[variant])
            print(name, variant, document["updates"][name][variant], flush=True)
            write()
    for name in options.algorithms:
        if options.seconds:
            document["training"][name] = training(name, options.game, options.seconds)
            print(name, json.dumps(document["training"][name]), flush=True)
            write()


def forget() -> None:
    """Free what the State before holds, and count the peak of memory from here."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def updates(name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of an update of synthetic rows, and of those the ones in which the GPU computes."""
    import torch

    forget()
    state, update = built(name, {**fields, "replay_size": ROWS})
    for _ in range(WARM):
        update()
    torch.cuda.synchronize()
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        update()
        torch.cuda.synchronize()
        times.append(1_000 * (time.perf_counter() - start))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        update()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    wall, busy = statistics.median(times), sum(event.time_range.elapsed_us() for event in kernels) / 1_000
    del state
    return {
        "milliseconds": round(wall, 2),
        "kernel_milliseconds": round(busy, 2),
        "waiting": round(max(0.0, 1 - busy / wall), 3),
        "kernels": len(kernels),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def built(name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """A State whose replay holds random images, and its update."""
    import gymnasium.spaces as gs
    import numpy as np
    import torch

    from foresight.envs.base import Spaces

    module, config = config_of(name, fields)
    state = module.build(config, Spaces(gs.Box(0, 255, (64, 64, 3), np.uint8), gs.Discrete(ACTIONS)), "cuda")
    generator = torch.Generator().manual_seed(0)
    carry = {name: x.cpu() for name, x in state.model.initial(1).items() if name in state.model.kept}
    for _ in range(ROWS - 10):
        cut = (torch.rand(1, generator=generator) < 0.01).float()
        action = torch.randint(ACTIONS, (1,), generator=generator)
        image = torch.randint(256, (1, 64, 64, 3), dtype=torch.uint8, generator=generator)
        row = {
            "obs": image, "action": action, "reward": torch.randn(1, generator=generator), "discount": 1 - cut,
            "cut": cut, "mask": torch.ones(1), "extras": {**carry, "action": torch.eye(ACTIONS)[action]},
        }  # fmt: skip
        state.replay.add(row, image)
    if name == "dreamer":
        return state, lambda: module.update(state, *module.sample(state))
    return state, lambda: module.update(state)


def config_of(name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The module of the algorithm and its Config for Atari 100k."""
    from foresight.runtime import catalog
    from foresight.runtime.config import config_fields
    from foresight.training.options import build_config

    own = {"replay_on_disk": False, "replay_on_device": True, **fields}
    values = config_fields.fields(name, {**catalog.presets(name)["atari100k"], **own})
    return catalog.module(name), build_config(catalog.config_class(name), **values)


def training(name: str, game: str, seconds: float) -> dict[str, Any]:
    """Train on `game` for that long; `return` in the losses is that of finished episodes, none early in training."""
    import torch

    from foresight.envs.make import make
    from foresight.runtime import catalog
    from foresight.runtime.machine import seed_everything

    forget()
    seed_everything(0)
    module, config = config_of(name, FASTEST)
    options = catalog.presets(name)["atari100k"]["env_options"]
    env = make(f"ALE/{game}-v5", num_envs=1, **options)
    state = module.build(config, env.spaces, "cuda")
    module.REPORT = 100
    steps = module.train(config, env, state=state)
    began, first = time.perf_counter(), 0.0
    curve: list[list[Any]] = []
    metrics: dict[str, Any] = {}
    start = 0
    for step, found, _ in steps:
        metrics |= found
        if state.gradient_steps and not first:
            first, start = time.perf_counter(), step
        curve.append(
            [step, round(time.perf_counter() - began, 1), round(found["return"], 2) if "return" in found else None]
        )
        if time.perf_counter() - began > seconds:
            break
    torch.cuda.synchronize()
    rate = (step - start) / (time.perf_counter() - first)
    steps.close()

    return {
        "game": game,
        "env_steps": step,
        "gradient_steps": state.gradient_steps,
        "env_steps_per_second": round(rate, 2),
        **({"over_published": round(rate / PUBLISHED, 2)} if name == "storm" else {}),
        "losses": {key: round(x, 4) for key, x in metrics.items() if isinstance(x, float)},
        "curve": curve[:: max(1, len(curve) // 50)],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


if __name__ == "__main__":
    main()
