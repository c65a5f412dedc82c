"""Control: batches of Gymnasium-style environments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.errors import UserError
from foresight.runtime.kinds.kind import Kind, Profiled, fold, make_env

if TYPE_CHECKING:
    from torch import Tensor

    from foresight.data.trajectory import Tree
    from foresight.envs.base import Env
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, Entry, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile
    from foresight.runtime.session import Session

EVALUATION_ENVS = 16  # stepped together in an evaluation
GAME = re.compile(r"[a-z][a-z0-9_]*")  # the name of a two-player game; Gymnasium's names have capitals
VERSIONED = re.compile(r"-v\d+$")  # the end of a Gymnasium name


def _resolve_name(name: str, entry: Entry) -> tuple[str | None, str]:
    """The kind "game" and the game's own name, where `name` is that of a game that the algorithm plays.

    Raises UserError for a game that only other algorithms play.
    """
    folded = fold(name)
    if not GAME.fullmatch(folded) or VERSIONED.search(name):
        return None, name
    from foresight.envs.games.game import TITLES
    from foresight.runtime import catalog

    if not entry.games and folded in TITLES:
        others = [one.name for one in catalog.algorithms().values() if one.games or one.kind == "game"]
        raise UserError(
            f"{TITLES[folded]} is a two-player game, which {entry.name} does not play: {', '.join(others)} do."
        )
    if not entry.games:
        return None, name
    return ("game", folded) if folded in TITLES or GAME.fullmatch(name) else (None, name)


def _training(settings: Settings) -> Env:
    count = settings.config.get("num_envs")
    return make_env(settings, **({"num_envs": count} if count else {}))


def _evaluation(settings: Settings, env: Env) -> Env:
    from foresight.envs.control import multi_task

    count = max(len(multi_task.tasks(settings.env)), min(EVALUATION_ENVS, settings.episodes or 1))
    return make_env(settings, num_envs=count)


def _single(settings: Settings, render: bool) -> Env:
    from foresight.envs.control import multi_task

    return make_env(settings, num_envs=len(multi_task.tasks(settings.env)), render=render)


def _connect(session: Session, state: State) -> None:
    from foresight import distributed
    from foresight.runtime.distributed import torchrun

    if distributed.processes() > 1:
        torchrun.broadcast_(state)


def _verify(state: State) -> None:
    from foresight import distributed
    from foresight.runtime.distributed import torchrun

    if distributed.processes() > 1:
        torchrun.check_equal(state)


def _profile(module: Algorithm, env: Env, times: Profile) -> Profiled[Env]:
    from foresight.runtime.monitoring import profile

    return profile.time_updates(module, times), profile.TimedEnv(env), "inference"


def _evaluate(module: Algorithm, state: State, env: Env, episodes: int | None, seed: int) -> Evaluation:
    from foresight.data.trajectory import tree_map
    from foresight.runtime import machine
    from foresight.runtime.evaluation import returns

    device = machine.device_of(state)

    def act(obs: Tree, carry: Tree) -> tuple[Tensor, Tree]:
        action, _, carry = module.act(state, tree_map(lambda x: x.to(device), obs), carry, explore=False)
        return action.cpu(), carry

    return returns.evaluate(env, act, episodes or 1, seed, getattr(module, "reset_carry", None))


def _baseline(module: Algorithm, state: State, env: Env, episodes: int | None, seed: int) -> Evaluation:
    from foresight.runtime.evaluation import returns

    return returns.evaluate(env, returns.random_policy(env, seed), episodes or 1, seed, None)


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    return agent.act_on(*agent.batch(obs), explore)


def _record(module: Algorithm, state: State, settings: Settings, path: Path) -> None:
    from foresight.runtime.evaluation import record

    env = _single(settings, render=True)
    try:
        record.write(path, record.episode(module, state, env, settings.seed))
    finally:
        env.close()


KIND = Kind(
    actors=True,
    replicas=True,
    resolve_name=_resolve_name,
    training_env=_training,
    evaluation_env=_evaluation,
    single_env=_single,
    connect=_connect,
    profile=_profile,
    timings=lambda times, due: times.shares() if due else {},
    evaluate=_evaluate,
    baseline=_baseline,
    verify=_verify,
    act=_act,
    record=_record,
    exports=("torchscript", "onnx"),
)
