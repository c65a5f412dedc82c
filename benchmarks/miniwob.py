"""Small policies on web pages: results/miniwob.json, or results/miniwob-few.json with few demonstrations.

python benchmarks/miniwob.py                         # 100 episodes of the oracle a page, then PPO and GRPO
python benchmarks/miniwob.py --demonstrations 1      # and from one
python benchmarks/miniwob.py --seeds 1               # adds a seed to the file, if the rest is equal

Ten pages of MiniWoB++, six of one click and four of two to five steps, one policy for all of them: it scores the
elements of a page by features (`envs.control.miniwob`). It imitates the oracle, and is then trained by PPO, and from
the same weights by GRPO. Scores are raw rewards, at least 0, over episodes with seeds of their own; the likeliest
action is taken. Controls: random actions, tasks whose words are those of another episode, and pages not trained on.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = 20_000_003  # the seed of evaluations, far from those of training
PAGES, OTHERS = "MiniWoB/ten", "MiniWoB/held-out"
KINDS = ("imitation", "ppo", "grpo", "shuffled", "held_out")  # what is scored of every seed
DEFAULTS = {"demonstrations": 100, "updates": 600, "steps": 3_200, "episodes": 25}  # of the command
Scores = dict[str, float]


def command(given: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """What makes the whole file: the options `given` and the `seeds` in it."""
    changed = [part for key in DEFAULTS if given[key] != DEFAULTS[key] for part in (f"--{key}", str(given[key]))]
    return shlex.join(["python", "benchmarks/miniwob.py", *changed, "--seeds", *map(str, seeds)])


def score(env: Any, act: Callable[[Any], Any], episodes: int, seed: int) -> Scores:
    """The mean of raw rewards, at least 0, of `episodes` of each page."""
    found: dict[str, list[float]] = {page: [] for page in env.pages}
    obs = env.reset(seed)
    while min(map(len, found.values())) < episodes:
        feedback = env.step(act(obs))
        obs = feedback.obs
        ended = (feedback.info.get(f"episode_{key}", ()) for key in ("task", "return"))
        for page, value in zip(*ended, strict=True):
            found[page].append(max(value, 0.0))
    return {page: statistics.fmean(values[:episodes]) for page, values in found.items()}


def record(env: Any, episodes: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Observations `[N, ...]` and actions `[N]` of `episodes` of the oracle on each page."""
    import torch

    left = dict.fromkeys(env.pages, episodes)
    running: list[list[Any]] = [[] for _ in range(env.num_envs)]
    kept: list[Any] = []
    obs = env.reset(seed)
    while any(left.values()):
        action = env.expert()
        feedback = env.step(action)
        for i, steps in enumerate(running):
            steps.append(({key: value[i] for key, value in obs.items()}, action[i]))
            if feedback.cut[i]:
                if left[env.page(i)]:
                    left[env.page(i)] -= 1
                    kept += steps
                running[i] = []
        obs = feedback.obs
    return {key: torch.stack([seen[key] for seen, _ in kept]) for key in kept[0][0]}, torch.stack(
        [action for _, action in kept]
    )


def imitate(network: Any, obs: dict[str, Any], action: Any, updates: int, seed: int) -> None:
    """Maximize the likelihood of the oracle's actions."""
    import torch

    from foresight.training import optim

    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        rows = torch.randint(0, len(action), (256,), generator=shuffler)
        output = network.policy({key: value[rows] for key, value in obs.items()})
        optim.descend(optimizer, (-output.logp(action[rows]).mean()).backward, 0.5)


def policy(network: Any) -> Callable[[Any], Any]:
    """The likeliest action of a network."""
    import torch

    def act(obs: Any) -> Any:
        with torch.inference_mode():
            return network.policy(obs).mode()

    return act


def groups(env: Any, network: Any, steps: int, seed: int) -> Any:
    """`network` after episode GRPO in groups of four."""
    import torch

    from foresight.algorithms.policy import episode_grpo

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, obs: Any) -> Any:
            return self.network.policy(obs)

    config = episode_grpo.Config(steps=steps, seed=seed, num_envs=env.num_envs, group=4, longest=8, learning_rate=1e-3)
    outputs = Outputs()
    optimizer = torch.optim.Adam(outputs.parameters(), lr=config.learning_rate, eps=1e-5)
    state = episode_grpo.State(
        config, outputs, optimizer, torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    )
    for step, metrics, _ in episode_grpo.train(config, env, state):
        print("grpo", step, {key: round(metrics[key], 3) for key in ("return", "used_groups")}, flush=True)
    return network


def proximal(env: Any, state: Any, config: Any) -> Any:
    """The network of `state` after PPO."""
    import torch

    from foresight.algorithms.policy import ppo

    state.optimizer = torch.optim.Adam(state.network.parameters(), lr=config.learning_rate, eps=1e-5)
    for step, metrics, _ in ppo.train(config, env, state):
        print("ppo", step, {key: round(metrics[key], 3) for key in ("return", "entropy") if key in metrics}, flush=True)
    return state.network


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demonstrations", type=int, help="episodes of the oracle a page")
    parser.add_argument("--updates", type=int, help="of imitation")
    parser.add_argument("--steps", type=int, help="actions of PPO, and of GRPO")
    parser.add_argument("--episodes", type=int, help="of an evaluation, a page")
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    import torch

    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    env = make(PAGES, num_envs=40)
    settings = {
        "demonstrations_per_page": given.demonstrations, "updates": given.updates, "steps": given.steps,
        "episodes_per_page": given.episodes,
    }  # fmt: skip
    file = given.out or ROOT / "results" / ("miniwob.json" if given.demonstrations == 100 else "miniwob-few.json")
    old = json.loads(file.read_text()) if file.is_file() else {}
    if any(old.get(key) != value for key, value in settings.items()):
        old = {}
    learned: dict[str, dict[str, Scores]] = old.get("each_seed", {name: {} for name in KINDS})
    bounds: dict[str, Scores] = old.get("bounds") or limits(env, given.episodes)
    print(bounds, flush=True)
    rates: list[float] = []
    for seed in given.seeds:
        begun = time.monotonic()
        obs, action = record(env, given.demonstrations, 1_000 * (seed + 1))
        rates.append(given.demonstrations * len(env.pages) / (time.monotonic() - begun))
        config = ppo.Config(
            steps=given.steps, seed=seed, num_envs=env.num_envs, rollout_steps=8, learning_rate=1e-3, gamma=0.95,
            entropy_coef=0.01, value_coef=0.5, activation="relu",
        )  # fmt: skip
        state = ppo.build(config, env.spaces)
        imitate(state.network, obs, action, given.updates, seed)
        learned["imitation"][f"{seed}"] = score(env, policy(state.network), given.episodes, HELD_OUT)
        print("imitation", learned["imitation"][f"{seed}"], f"{time.monotonic() - began:.0f} s", flush=True)
        start = copy.deepcopy(state.network)
        network = proximal(env, state, config)
        learned["ppo"][f"{seed}"] = score(env, policy(network), given.episodes, HELD_OUT)
        print("ppo", learned["ppo"][f"{seed}"], f"{time.monotonic() - began:.0f} s", flush=True)
        for name, pages, options in (("shuffled", PAGES, {"shuffled": True}), ("held_out", OTHERS, {})):
            other = make(pages, num_envs=40, **options)
            learned[name][f"{seed}"] = score(other, policy(network), given.episodes, HELD_OUT)
            print(name, learned[name][f"{seed}"], flush=True)
            other.close()
        grouped = groups(env, start, given.steps, seed)
        env.same_starts(1)
        learned["grpo"][f"{seed}"] = score(env, policy(grouped), given.episodes, HELD_OUT)
        print("grpo", learned["grpo"][f"{seed}"], f"{time.monotonic() - began:.0f} s", flush=True)
    env.close()
    seeds = sorted(map(int, learned["grpo"]))
    document: dict[str, Any] = {
        "what": "MiniWoB++, a policy over features of elements: imitation of the oracle, then PPO and GRPO, "
        "raw rewards of held-out episodes",
        "command": command(vars(given), seeds),
        "seeds": seeds,
        **settings,
        **summary(learned, bounds),
        "oracle_episodes_per_second": statistics.median(rates),
        "bounds": bounds,
        "each_seed": learned,
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(old.get("seconds", 0) + time.monotonic() - began, 1),
    }
    checkpoint.write_atomic(file, json.dumps(document, indent=2) + "\n")


def limits(env: Any, episodes: int) -> dict[str, Scores]:
    """The scores of the oracle, which is the ceiling, and of random actions, also on pages that are not trained on."""
    import torch

    from foresight.envs.make import make

    draw = torch.Generator().manual_seed(0)

    def chance(obs: Any) -> Any:
        return torch.multinomial(obs["action_mask"].float(), 1, generator=draw)[:, 0]

    other = make(OTHERS, num_envs=40)
    found = {
        "oracle": score(env, lambda obs: env.expert(), episodes, HELD_OUT),
        "random": score(env, chance, episodes, HELD_OUT),
        "held_out_oracle": score(other, lambda obs: other.expert(), episodes, HELD_OUT),
        "held_out_random": score(other, chance, episodes, HELD_OUT),
    }
    other.close()
    return found


def summary(learned: dict[str, dict[str, Scores]], bounds: dict[str, Scores]) -> dict[str, Any]:
    """Means over seeds, by page and by tier; those of tiers are shares of the oracle's."""
    from foresight.envs.tools import web

    means: dict[str, Any] = {
        kind: {page: statistics.fmean(row[page] for row in rows.values()) for page in next(iter(rows.values()))}
        for kind, rows in learned.items()
    }
    tiers: dict[str, Any] = {}
    for tier, pages in (("one_click", web.ONE_CLICK), ("few_steps", web.FEW_STEPS)):
        ceiling = sum(bounds["oracle"][page] for page in pages)
        trained = {kind: means[kind] for kind in KINDS if kind != "held_out"} | {"random": bounds["random"]}
        tiers[tier] = {kind: sum(scores[page] for page in pages) / ceiling for kind, scores in trained.items()}
    best = {page: max(means["ppo"][page], means["grpo"][page]) for page in bounds["oracle"]}
    return {
        **tiers,
        "pages_20_points_above_imitation": sum(best[page] - score >= 0.2 for page, score in means["imitation"].items()),
        "held_out_pages": statistics.fmean(means["held_out"].values()),
        "held_out_pages_random": statistics.fmean(bounds["held_out_random"].values()),
        **means,
    }


if __name__ == "__main__":
    main()
