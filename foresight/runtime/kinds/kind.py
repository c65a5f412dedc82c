"""`Kind`: what the runtime needs to know about a kind of environment, as constants and functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from foresight.errors import UserError

if TYPE_CHECKING:
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, Entry, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile
    from foresight.runtime.session import Session

Environment = TypeVar("Environment")  # an `Env`, `MDP`, `TextTask` or `Game`
Profiled = tuple[AbstractContextManager[None], Environment, str | None]  # see `Kind.profile`


def _as_given(name: str, entry: Entry) -> tuple[str | None, str]:
    return None, name


def _unprofiled(module: Algorithm, env: Environment, times: Profile) -> Profiled[Environment]:
    return nullcontext(), env, None


def _one_environment(settings: Settings, env: str) -> Settings:
    raise UserError(f"A '{settings.kind}' run has one environment, '{settings.typed().env}': leave out --env.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind(Generic[Environment]):
    """How a run of one kind of environment is chosen, built, trained, evaluated, recorded and shown.

    Only the fields that differ from the defaults are set by a kind.
    """

    # Selection
    option: str = "env"  # the command-line option that names the environment: --env or --task
    episodes: int | None = 20  # of an evaluation by default; None: all held-out examples
    ignore_case: bool = True  # whether presets are found by a name in any case
    data: bool = False  # whether the Config field `data` may stand for the environment
    files: bool = False  # whether the environment may be files, whose paths config.yaml then holds: copied if small
    inputs: bool = False  # whether Config fields name folders that are read, whose paths config.yaml then holds
    completer: bool = False  # whether a server may sample
    actors: bool = False  # whether actors may collect in separate processes
    large_optimizers: bool = False  # whether only the newest checkpoint of a run has moments, and an ended run none
    replicas: bool = False  # under torchrun: each process trains a replica in its own envs; else all share one batch
    scored_by: tuple[str, ...] = ()  # Config fields that define the score: with other values it is not comparable
    gpu: bool = True  # whether `--device auto` picks a GPU
    resolve_name: Callable[[str, Entry], tuple[str | None, str]] = _as_given  # -> (another kind or None, name)

    # Construction
    training_env: Callable[[Settings], Environment]
    # (settings, training env)
    evaluation_env: Callable[[Settings, Environment], Environment] = lambda settings, env: env
    single_env: Callable[[Settings, bool], Environment]  # (settings, render): one env per task
    only: Callable[[Settings, str], Settings] = _one_environment  # of a run of several environments, one
    # Printed before training
    notes: Callable[[Settings, Any, Environment], list[str]] = lambda settings, config, env: []
    connect: Callable[[Session, State], None] = lambda session, state: None  # after `build`: other processes, servers
    # Raises UserError before training
    check: Callable[[State, Environment, Any], None] = lambda state, env, config: None

    begin: Callable[[Session, State, Environment], None] = lambda session, state, env: None  # before training
    shown: Callable[[Settings], tuple[str, ...]] = lambda settings: ()  # metrics shown live, after the algorithm's own

    # Training
    repeatable: bool = False  # whether a failed step leaves the State unchanged, so that it can be saved and repeated
    # (module, env, times) -> a context for training, the env to train in, the section that gets the remaining time
    profile: Callable[[Algorithm, Environment, Profile], Profiled[Environment]] = _unprofiled
    timings: Callable[[Profile, bool], dict[str, float]] = lambda times, due: {}  # metrics of a step; `due` each second

    # Evaluation
    # (module, state, env, episodes, seed): greedy; then the same of a random or untrained policy
    evaluate: Callable[[Algorithm, State, Environment, int | None, int], Evaluation]
    baseline: Callable[[Algorithm, State, Environment, int | None, int], Evaluation]
    synchronize: Callable[[Evaluation], Evaluation] = lambda result: result  # all processes take the first one's
    verify: Callable[[State], None] = lambda state: None  # at the end: raises if the processes differ
    describe: Callable[[Path, Settings, dict[str, Any]], None] = lambda folder, settings, summary: None  # an export

    # Use
    act: Callable[[Agent, Any, bool], Any]  # (agent, obs, explore): see `Agent.act`
    record: Callable[[Algorithm, State, Settings, Path], None] | None = None  # (module, state, settings, video)
    exports: tuple[str, ...] = ()  # formats of `foresight export`
    matches: bool = False  # whether its runs play matches
    played: bool = True  # whether `foresight play` shows, prompts or plays its runs
    pictures: tuple[str, ...] = ()  # the commands that print the algorithm's `picture` of a result


def fold(name: str) -> str:
    """A name in lower case with underscores, for comparison."""
    return name.lower().replace("-", "_").replace(" ", "_")


def make_env(settings: Settings, **options: Any) -> Any:
    """The environment of a run, with its options and `options`."""
    from foresight.envs.make import make

    options = {**settings.env_options, **options}
    for word in {"name", "kind"} & options.keys():
        raise UserError(
            f"--env-options cannot give '{word}', which this library itself chooses by: leave it out. If it is an "
            f"argument of your own environment, register that with kwargs={{'{word}': ...}}."
        )
    return make(settings.env, settings.kind, **options)
