"""Episodes of a trained run, recorded and written as a Minari data set of parquet files."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import shutil
from pathlib import Path

import gymnasium
import torch

from foresight.data import episodes as data
from foresight.data import trees
from foresight.data.episodes import Episodes
from foresight.envs import collect
from foresight.errors import UserError
from foresight.runtime import environments
from foresight.runtime.agent import Agent
from foresight.runtime.evaluation import returns

MINARI = "~=0.5.4"  # the versions of Minari that read the files; parquet came in 2025


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
    device = next((x.device for x in vars(agent.state).values() if isinstance(x, torch.Generator)), "cpu")
    try:
        if random:
            uniform = returns.random_policy(env, seed)
            return collect.record(env, seed, lambda obs, carry: (uniform(obs, None)[0], {}, None), quota)
        return collect.record(
            env, seed, functools.partial(agent.module.act, agent.state, explore=explore), quota,
            torch.device(device), rewarded=getattr(agent.module, "rewarded", None),
            reset_carry=getattr(agent.module, "reset_carry", trees.reset_carry),
        )  # fmt: skip
    finally:
        if env is not agent.env:
            environments.close(env)


def write(episodes: Episodes, agent: Agent, out: str | Path) -> Path:
    """Write a data set to the new folder `out`. Raises UserError if it exists or cannot be written."""
    out = Path(out).expanduser()
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
            "observation_space": data.describe(agent.spaces.obs),
            "action_space": data.describe(agent.spaces.action),
            "dataset_id": f"foresight/{name}-v0",
            "minari_version": MINARI,
            "dataset_size": round(size / 1e6, 1),
            "algorithm_name": agent.settings.algorithm,
        }
        if agent.settings.env in gymnasium.registry and not agent.settings.env_options:
            metadata["env_spec"] = gymnasium.spec(agent.settings.env).to_json()
        (draft / "data" / "metadata.json").write_text(json.dumps(metadata))
        draft.rename(out)
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}. Choose another --out.") from error
    return out
