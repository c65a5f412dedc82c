"""Data from a model's own graded answers: preferences and demonstrations, without anybody's download."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from foresight.envs.text import TextTask
from foresight.errors import UserError
from foresight.nets.language import LanguageModel
from foresight.planning.rollout import Rollout, complete, texts

CHUNK = 64  # prompts in one batch of answers


def answered(
    policy: LanguageModel,
    task: TextTask,
    prompts: int | None,
    group: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[Rollout]:
    """`group` graded answers to each of the first `prompts` training prompts (all if None), some prompts at a time."""
    examples = list(task.train)[:prompts]
    for start in range(0, len(examples), CHUNK):
        few = examples[start : start + CHUNK]
        batch = complete(policy, few, group, max_new_tokens, temperature, generator, stop=task.stop)
        answers = texts(policy, batch)
        rewards, _ = task.reward([example for example in few for _ in range(group)], answers)
        yield Rollout(few, batch, answers, torch.tensor(rewards).view(len(few), group))


def preferences(rollout: Rollout, most: int) -> list[dict[str, Any]]:
    """Up to `most` pairs a prompt of different answers with different rewards: every good answer before any again.

    Answers that hit the limit or could not be scored are in none. Rows have prompt, chosen, rejected and both rewards.
    """
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "chosen_reward": high, "rejected_reward": low}
        for prompt, group in _ranked(rollout)
        for (chosen, high), (rejected, low) in itertools.islice(_pairs(group), most)
    ]


def _pairs(group: list[tuple[str, float]]) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    """All pairs of a better and a worse answer, round by round, in each of which an answer is chosen once at most."""
    known = [(better, [answer for answer in group if answer[1] < better[1]]) for better in group]
    for turn in range(len(group)):
        for i, (better, worse) in enumerate(known):
            if turn < len(worse):
                yield better, worse[(i + turn) % len(worse)]


def demonstrations(rollout: Rollout, most: int, least: float) -> list[dict[str, Any]]:
    """Up to `most` different answers a prompt whose reward is at least `least`: rejection sampling."""
    return [
        {"prompt": prompt, "completion": text, "reward": reward}
        for prompt, group in _ranked(rollout)
        for text, reward in [pair for pair in group if pair[1] >= least][:most]
    ]


def _ranked(rollout: Rollout) -> Iterator[tuple[Any, list[tuple[str, float]]]]:
    """Each prompt with its different, whole, scored answers, the best first."""
    size = rollout.rewards.shape[1]
    for p, example in enumerate(rollout.examples):
        found: dict[str, float] = {}
        for g in range(size):
            reward, text = rollout.rewards[p, g].item(), rollout.answers[p * size + g]
            if reward == reward and rollout.batch.stopped[p, g] and text.strip():
                found.setdefault(text, reward)
        if found:
            yield example.prompt, sorted(found.items(), key=lambda pair: -pair[1])


def make(kind: str, rollout: Rollout, most: int, least: float = 1.0) -> list[dict[str, Any]]:
    """The rows of one kind. Raises UserError for a kind that does not exist."""
    if kind == "preferences":
        return preferences(rollout, most)
    if kind == "demonstrations":
        return demonstrations(rollout, most, least)
    raise UserError(f"There is no data of the kind '{kind}': preferences or demonstrations.")
