"""Images: labeled images, which a network classifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foresight.runtime.kinds.kind import Kind, make_env

if TYPE_CHECKING:
    from foresight.envs.images.make import Images
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation

BATCH = 256  # images of one pass


def _evaluate(module: Algorithm, state: State, env: Images, episodes: int | None, seed: int) -> Evaluation:
    """The share of the held-out images that are classified correctly."""
    from foresight.runtime import machine
    from foresight.runtime.evaluation.evaluate import Evaluation

    device, hits = machine.device_of(state), list[float]()
    images, labels = env.test[: episodes or None], env.test_label[: episodes or None]
    for batch, label in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        found, _, _ = module.act(state, batch.to(device), explore=False)
        hits += (found.cpu() == label).float().tolist()
    return Evaluation.of("accuracy", hits)


def _baseline(module: Algorithm, state: State, env: Images, episodes: int | None, seed: int) -> Evaluation:
    """The most frequent class."""
    from foresight.runtime.evaluation.evaluate import Evaluation

    most = env.train_label.bincount().argmax()
    return Evaluation.of("accuracy", (env.test_label[: episodes or None] == most).float().tolist())


def _notes(settings: Settings, config: object, env: Images) -> list[str]:
    return [env.sizes()]


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    return agent.act_on(*agent.batch(obs), explore)


KIND = Kind(
    episodes=None,
    training_env=make_env,
    single_env=lambda settings, render: make_env(settings),
    notes=_notes,
    evaluate=_evaluate,
    baseline=_baseline,
    act=_act,
    played=False,
)
