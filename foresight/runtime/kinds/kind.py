"""What the runtime needs to know about a kind of environment: a dataclass of facts and functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, Entry, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile
    from foresight.runtime.session import Session

Environment = TypeVar("Environment")  # an `Env`, `MDP`, `TextTask` or `Game`
Timed = tuple[AbstractContextManager[None], Environment, str | None]  # see `Kind.profiled`


def _as_given(name: str, entry: Entry) -> tuple[str | None, str]:
    return None, name


def _unprofiled(module: Algorithm, env: Environment, times: Profile) -> Timed[Environment]:
    return nullcontext(), env, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind(Generic[Environment]):
    """How a run of one kind of environment is chosen, built, trained, evaluated, recorded and shown.

    Only the fields that differ from the defaults are set by a kind.
    """

    # Chosen
    word: str = "env"  # the option of the command line that names the environment: --env or --task
    episodes: int | None = 20  # of an evaluation by default; None: all held-out examples
    folded: bool = True  # whether presets are found by a name in any case
    data: bool = False  # whether the Config field `data` may stand for the environment
    files: bool = False  # whether the run may need files and folders, which config.yaml then locates
    completer: bool = False  # whether a server may sample
    actors: bool = False  # whether actors may collect in processes of their own
    replicas: bool = False  # under torchrun each process trains a copy in its own envs; otherwise all see one batch
    gpu: bool = True  # whether `--device auto` picks a GPU
    named: Callable[[str, Entry], tuple[str | None, str]] = _as_given  # (name, entry) -> (another kind or None, name)

    # Built
    training_env: Callable[[Settings], Environment]
    # (settings, training env)
    evaluation_env: Callable[[Settings, Environment], Environment] = lambda settings, env: env
    single_env: Callable[[Settings, bool], Environment]  # (settings, render): one env per task
    notes: Callable[[Settings, Any, Environment], list[str]] = (
        lambda settings, config, env: []
    )  # printed before training
    connected: Callable[[Session, State], None] = lambda session, state: None  # after `build`: other processes, servers
    checked: Callable[[State, Environment, Any], None] = lambda state, env, config: (
        None
    )  # raises UserError before training

    # Trained
    repeats: bool = False  # whether a failed step leaves the State as it was, so that it can be saved and repeated
    # (module, env, times) -> what to enter during training, the env to train in, the section of the remaining time.
    profiled: Callable[[Algorithm, Environment, Profile], Timed[Environment]] = _unprofiled
    timings: Callable[[Profile, bool], dict[str, float]] = lambda times, due: {}  # metrics of a step; `due` each second

    # Evaluated
    # (module, state, env, episodes, seed): greedy; then the same of a random or untrained policy
    evaluate: Callable[[Algorithm, State, Environment, int | None, int], Evaluation]
    baseline: Callable[[Algorithm, State, Environment, int | None, int], Evaluation]
    agreed: Callable[[Evaluation], Evaluation] = lambda result: result  # of all processes: that of the first
    verified: Callable[[State], None] = lambda state: None  # at the end: raises if the processes differ
    described: Callable[[Path, Settings, dict[str, Any]], None] = lambda folder, settings, summary: None  # an export

    # Used
    act: Callable[[Agent, Any, bool], Any]  # (agent, obs, explore): see `Agent.act`
    record: Callable[[Algorithm, State, Settings, Path], None] | None = None  # (module, state, settings, video)
    exports: tuple[str, ...] = ()  # formats of `foresight export`
    matches: bool = False  # whether its runs play matches
    pictures: tuple[str, ...] = ()  # the commands that print the algorithm's `picture` of a result


def fold(name: str) -> str:
    """A name in lower case, its words joined by underscores: how names are compared."""
    return name.lower().replace("-", "_").replace(" ", "_")


def made(settings: Settings, **options: Any) -> Any:
    """The environment of a run, with its options and `options`."""
    from foresight.envs.make import make

    return make(settings.env, settings.kind, **{**settings.env_options, **options})
