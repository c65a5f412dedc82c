"""Text: prompts that a language model completes and a grader scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.errors import UserError
from foresight.runtime.kinds.kind import Kind, Profiled, make_env

if TYPE_CHECKING:
    from foresight.envs.text.task import TextTask
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile
    from foresight.runtime.session import Session

SAMPLES = 16  # completions of an evaluation that are logged


def _notes(settings: Settings, config: object, env: TextTask) -> list[str]:
    from foresight.envs.text.worker import GIVEN
    from foresight.runtime.config.config_fields import written
    from foresight.training import corpus

    notes = [corpus.about(str(getattr(config, "data", "")), env)]
    if GIVEN in str(written(settings.env_options)):
        notes.append(
            "The reward function was given as a Python object and cannot be found again. Define it at the top level of "
            "a file to resume or evaluate this run later."
        )
    return notes


def _training_env(settings: Settings) -> TextTask:
    """The task. Raises UserError where nothing scores answers that the algorithm needs scored, before a model loads.

    Also for conversations under torchrun: each process would have environments of its own, and other prompts after the
    first turn.
    """
    from foresight import distributed
    from foresight.runtime import catalog

    task: TextTask = make_env(settings)
    if task.episode is not None and distributed.processes() > 1:
        raise UserError(
            f"'{task.name}' has conversations with an environment, which do not work under torchrun: choose a task "
            "without tools, or run without torchrun."
        )
    module = catalog.module(settings.algorithm)
    scored = task.grader is not None or task.episode is not None
    if not scored and not hasattr(module, "assess") and not hasattr(module, "measure"):
        task.grade((), ())  # raises
    return task


def _connect(session: Session, state: State) -> None:
    from foresight import distributed
    from foresight.planning.generation import all_gather, server

    if session.settings.completer is not None:
        server.attach(state, session.settings.completer, session.served, session.progress.note)
    elif distributed.processes() > 1:
        all_gather.attach(state)


def _check(state: State, env: TextTask, config: object) -> None:
    from foresight.planning.generation import rollout

    if hasattr(state, "policy"):
        rollout.check_lengths(state.policy, env, config)


def _begin(session: Session, state: State, env: TextTask) -> None:
    """Let conversations be held while the model trains, if the run has a bound on their staleness."""
    from foresight.planning.generation import asynchronous

    if session.settings.staleness is None:
        return
    if not getattr(session.module, "STALE", False):
        raise UserError(
            f"{session.entry.name} does not correct for samples of earlier weights: leave out --staleness, or train "
            "with grpo, dr_grpo, dapo, gspo or cispo."
        )
    session.disconnect = asynchronous.attach(state, env, session.settings.staleness).close


def _profile(module: Algorithm, env: TextTask, times: Profile) -> Profiled[TextTask]:
    from foresight.runtime.monitoring import profile

    return profile.time_language(module, times), env, "other"


def _evaluate(module: Algorithm, state: State, task: TextTask, episodes: int | None, seed: int) -> Evaluation:
    """Greedy completions of held-out examples. One that cannot be scored (NaN) is left out; it does not count as 0."""
    from foresight import distributed
    from foresight.envs.text import graders
    from foresight.runtime.evaluation import evaluate

    if hasattr(module, "measure"):
        return evaluate.from_measure(module, state, task)
    examples = list(task.test)[: episodes or None]
    if not examples:
        raise UserError("The task has no held-out examples to evaluate on.")
    if getattr(task, "grader", True) is None and hasattr(module, "assess"):
        metric, values = module.assess(state, examples)
        return evaluate.Evaluation.of(metric, values)
    if getattr(task, "episode", None) is not None:
        from foresight.planning.generation import multi_turn

        found = multi_turn.converse(state.policy, task, examples, 1, state.config.max_new_tokens, 0.0)
        outcomes = found.parts["outcome"]
        samples = _samples(examples, found.texts, outcomes)
        for i, sample in enumerate(samples):
            parts = {name: values[i] for name, values in found.parts.items()}
            sample |= {"parts": parts, "transcript": found.transcripts[i]}
        measured = {name: graders.scored(values) for name, values in found.parts.items()}
        others = {name: sum(values) / len(values) for name, values in measured.items() if values and name != "outcome"}
        result = _scored(task.metric, outcomes)
        return dataclasses.replace(result, samples=samples, extra_metrics=others)
    completions, _, _ = module.act(state, examples, explore=False)
    rewards = [float(reward) for reward in distributed.on_first(lambda: task.grade(examples, completions))]
    result = _scored(getattr(task, "metric", "reward"), rewards)
    return dataclasses.replace(result, samples=_samples(examples, completions, rewards))


def _scored(metric: str, rewards: Sequence[float]) -> Evaluation:
    """The evaluation of the rewards that are not NaN; an unknown one if all are."""
    from foresight.envs.text import graders
    from foresight.runtime.evaluation.evaluate import Evaluation

    scored = graders.scored(rewards)
    return Evaluation.of(metric, scored) if scored else Evaluation(metric, math.nan, math.nan, 0)


def _samples(examples: Sequence[Any], texts: Sequence[str], rewards: Sequence[float]) -> tuple[dict[str, Any], ...]:
    """The first examples with their greedy completions: the same ones at every evaluation, so that they compare."""
    few = list(zip(examples, texts, rewards, strict=True))[:SAMPLES]
    return tuple(
        {"prompt": str(getattr(e, "question", e)), "completion": str(text), "reward": reward, "held_out": True}
        for e, text, reward in few
    )


def _baseline(module: Algorithm, state: State, env: TextTask, episodes: int | None, seed: int) -> Evaluation:
    from foresight.runtime.evaluation import evaluate

    return evaluate.evaluate(module, state, env, episodes, seed)


def _synchronize(result: Evaluation) -> Evaluation:
    from foresight import distributed

    first: Evaluation = distributed.broadcast(result)
    return first


def _describe(folder: Path, settings: Settings, summary: dict[str, Any]) -> None:
    from foresight import distributed
    from foresight.runtime import card

    if distributed.rank() == 0:
        card.write(folder, settings, summary)


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    single = not isinstance(obs, list | tuple)
    prompts = [agent.env.ask(x) if isinstance(x, str | list) else x for x in ([obs] if single else obs)]
    completions, _, _ = agent.module.act(agent.state, prompts, explore=explore)
    return completions[0] if single else completions


KIND = Kind(
    option="task",
    episodes=None,
    ignore_case=False,
    data=True,
    files=True,
    inputs=True,
    completer=True,
    large_optimizers=True,
    training_env=_training_env,
    single_env=lambda settings, render: make_env(settings),
    notes=_notes,
    connect=_connect,
    check=_check,
    begin=_begin,
    shown=lambda settings: () if settings.staleness is None else ("staleness", "waiting"),
    repeatable=True,
    profile=_profile,
    timings=lambda times, due: times.throughput(),
    evaluate=_evaluate,
    baseline=_baseline,
    synchronize=_synchronize,
    describe=_describe,
    act=_act,
    exports=("merged", "adapter", "gguf"),
    pictures=("eval",),
)
