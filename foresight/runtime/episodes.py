"""Episodes of a trained run or of an expert, recorded and written as a Minari data set of parquet files."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch

from foresight.data import episodes as data
from foresight.data import lerobot, trees
from foresight.data.episodes import Episodes
from foresight.envs import collect
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.runtime import environments, machine
from foresight.runtime.agent import Agent
from foresight.runtime.evaluation import record as video
from foresight.runtime.evaluation import returns

MINARI = "0.5.4"  # the version of Minari whose format this is


def record(agent: Agent, episodes: int, seed: int = 0, explore: bool = False, random: bool = False) -> Episodes:
    """`episodes` whole episodes of the agent, or of uniformly `random` actions; with `explore`, actions are sampled.

    A fixed quota per environment: the first to end would be biased to short ones. Raises UserError for environments
    that are not of the kind "control", and for observations and actions that cannot be stored.
    """
    if agent.settings.kind != "control":
        raise UserError(f"Episodes are recorded in control environments, but this is a '{agent.settings.kind}' run.")
    data.check_spaces(agent.spaces.obs, agent.spaces.action)
    env = environments.evaluation(dataclasses.replace(agent.settings, episodes=episodes), agent.env)
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    try:
        if random:
            uniform = returns.random_policy(env, seed)
            return collect.record(env, seed, lambda obs, carry: (uniform(obs, None)[0], {}, None), quota)
        return collect.record(
            env, seed, functools.partial(agent.module.act, agent.state, explore=explore), quota,
            machine.device_of(agent.state), rewarded=getattr(agent.module, "rewarded", None),
            reset_carry=getattr(agent.module, "reset_carry", trees.reset_carry),
        )  # fmt: skip
    finally:
        if env is not agent.env:
            environments.close(env)


def demonstrate(env: Env, episodes: int, seed: int = 0) -> Episodes:
    """`episodes` whole episodes of the environment's own expert. Raises UserError if it has none."""
    expert = getattr(env, "expert", None)
    if expert is None:
        raise UserError(
            f"'{env.name}' has no expert of its own. Record a run instead: foresight data episodes RUN --out DIR"
        )
    data.check_spaces(*env.spaces[:2])
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    return collect.record(env, seed, lambda obs, carry: (expert(), {}, carry), quota)


def write(episodes: Episodes, spaces: Spaces, env: str, options: Mapping[str, Any], author: str, out: Path) -> Path:
    """Write a data set to the new folder `out`. Raises UserError if it exists or cannot be written.

    The episodes are of the environment `env` with these `options`, and `author` is what acted.
    """
    out = out.expanduser()
    if out.exists():
        raise UserError(f"The folder {out} already exists: choose another --out, or remove it.")
    parquet = importlib.import_module("pyarrow.parquet")
    draft = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        for number in range(len(episodes)):
            folder = draft / "data" / str(number)
            folder.mkdir(parents=True)
            parquet.write_table(data.table(episodes, number), folder / "part-0.parquet")
            steps = int(episodes.length[number])
            (folder / "metadata.json").write_text(json.dumps({"id": number, "total_steps": steps}))
        size = sum(file.stat().st_size for file in draft.rglob("*"))
        name = re.sub(r"\W+", "_", out.name)
        metadata = {
            "total_episodes": len(episodes),
            "total_steps": int(episodes.length.sum()),
            "data_format": "parquet",
            "jpeg_encoding": False,  # images are stored as they are
            "observation_space": data.describe(spaces.obs),
            "action_space": data.describe(spaces.action),
            "dataset_id": f"foresight/{name}-v0",
            "minari_version": MINARI,
            "dataset_size": round(size / 1e6, 1),
            "algorithm_name": author,
        }
        if env in gymnasium.registry and not options:
            metadata["env_spec"] = gymnasium.spec(env).to_json()
        (draft / "data" / "metadata.json").write_text(json.dumps(metadata))
        draft.rename(out)
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}. Choose another --out.") from error
    return out


def write_lerobot(
    episodes: Episodes, obs: gymnasium.Space[Any], action: gymnasium.Space[Any], fps: float, task: str, out: Path
) -> Path:
    """Write a LeRobotDataset v3.0 to the new folder `out`; `task` is a sentence. Raises UserError as `write` does."""
    out = out.expanduser()
    if out.exists():
        raise UserError(f"The folder {out} already exists: choose another --out, or remove it.")
    made = lerobot.files(episodes, obs, action, fps, task)
    parquet = importlib.import_module("pyarrow.parquet")
    draft = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        for name, content in made.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, torch.Tensor):
                video.write(draft / name, content.numpy(), fps, exact=True)
            elif isinstance(content, dict):
                (draft / name).write_text(json.dumps(content, indent=4))
            else:
                parquet.write_table(content, draft / name)
        draft.rename(out)
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}. Choose another --out.") from error
    return out
