"""Preference pairs, demonstrations and labeled steps from a model's own graded answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError, unknown
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.constraints import before
from foresight.planning.generation.rollout import complete, texts
from foresight.planning.generation.server import Server

CHUNK = 64  # prompts in one batch of answers


@dataclass(frozen=True)
class Graded:
    """G answers to each of P prompts: texts, prompt by prompt; whether each ended by itself, and reward, `[P, G]`."""

    examples: list[Example]
    answers: list[str]
    stopped: Tensor
    rewards: Tensor


def sample(
    policy: LanguageModel,
    task: TextTask,
    prompts: int | None,
    group: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    composite: bool = True,
    first: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[Graded]:
    """`group` graded answers to each of the first `prompts` training prompts (None: all), in chunks of prompts.

    They are graded by the training reward or, if not `composite`, by the task's own grader (right or wrong). Prompts
    before `first` are left out: they were answered before. Each text of `stop` ends an answer and is left out of it.
    """
    examples, ends = list(task.train)[:prompts], tuple(dict.fromkeys((*task.stop, *stop)))
    for start in range(first, len(examples), CHUNK):
        few = examples[start : start + CHUNK]
        if isinstance(policy.completer, Server):  # texts are enough here; some servers return only texts
            ids = [policy.encode(example.prompt, example.tools) for example in few]
            answers, ended = policy.completer.generate_texts(
                ids, group, max_new_tokens, temperature, generator, stop=ends
            )
            stopped = torch.tensor(ended).view(len(few), group)
        else:
            batch = complete(policy, few, group, max_new_tokens, temperature, generator, stop=ends)
            answers, stopped = texts(policy, batch), batch.stopped
        answers = [before(answer, stop) for answer in answers]
        repeated = [example for example in few for _ in range(group)]
        rewards = task.reward(repeated, answers)[0] if composite else task.grade(repeated, answers)
        yield Graded(few, answers, stopped, torch.tensor(rewards).view(len(few), group))


def preferences(found: Graded, most: int) -> list[dict[str, Any]]:
    """Up to `most` pairs per prompt, of answers with different rewards; each better answer is used before any is
    reused.

    Truncated and unscorable answers are left out. Rows have prompt, chosen, rejected and both rewards.
    """
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "chosen_reward": high, "rejected_reward": low}
        for prompt, group in _ranked(found)
        for (chosen, high), (rejected, low) in itertools.islice(_pairs(group), most)
    ]


def _pairs(group: list[tuple[str, float]]) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    """All pairs of a better and a worse answer, in rounds; in a round each answer is the chosen one at most once."""
    pairs = [(better, [answer for answer in group if answer[1] < better[1]]) for better in group]
    for turn in range(len(group)):
        for i, (better, worse) in enumerate(pairs):
            if turn < len(worse):
                yield better, worse[(i + turn) % len(worse)]


def demonstrations(found: Graded, most: int, least: float) -> list[dict[str, Any]]:
    """Up to `most` different answers per prompt whose reward is at least `least`: rejection sampling."""
    return [
        {"prompt": prompt, "completion": text, "reward": reward}
        for prompt, group in _ranked(found)
        for text, reward in [pair for pair in group if pair[1] >= least][:most]
    ]


def steps(found: Graded, task: TextTask, most: int) -> list[dict[str, Any]]:
    """Up to `most` different answers per prompt with their steps, each labeled by the task's exact verifier.

    Truncated answers are left out. Rows have prompt, completions (the steps) and labels, and the task's delimiter if it
    is no line break; a step after a wrong one is wrong. Raises UserError if the task has no verifier.
    """
    if task.verifier is None:
        raise UserError(f"The steps of '{task.name}' cannot be labeled: it has no exact verifier. Use --task chains.")
    rows, size = list[dict[str, Any]](), found.rewards.shape[1]
    between = {} if task.delimiter == "\n" else {"delimiter": task.delimiter}
    for p, example in enumerate(found.examples):
        answers = dict.fromkeys(
            a
            for a, whole in zip(found.answers[p * size : (p + 1) * size], found.stopped[p].tolist(), strict=True)
            if whole
        )
        for answer in list(answers)[:most]:
            parts = [part for part in answer.split(task.delimiter) if part.strip()]
            if not parts:
                continue
            texts = [task.delimiter.join(parts[: i + 1]) + task.delimiter for i in range(len(parts) - 1)]
            labels = task.verifier([example] * len(parts), [*texts, task.delimiter.join(parts)])
            right = [label >= 1 for label in labels]
            rows.append({"prompt": example.prompt, "completions": parts, "labels": right, **between})
    return rows


def _ranked(found: Graded) -> Iterator[tuple[Any, list[tuple[str, float]]]]:
    """Each prompt with its distinct, complete, scored answers, best first."""
    size = found.rewards.shape[1]
    for p, example in enumerate(found.examples):
        seen: dict[str, float] = {}
        for g in range(size):
            reward, text = found.rewards[p, g].item(), found.answers[p * size + g]
            if reward == reward and found.stopped[p, g] and text.strip():
                seen.setdefault(text, reward)
        if seen:
            yield example.prompt, sorted(seen.items(), key=lambda pair: -pair[1])


def make(kind: str, found: Graded, task: TextTask, most: int, least: float = 1.0) -> list[dict[str, Any]]:
    """The dataset rows of one kind: "preferences", "demonstrations" or "steps". Raises UserError for another kind."""
    if kind == "steps":
        return steps(found, task, most)
    if kind == "preferences":
        return preferences(found, most)
    if kind == "demonstrations":
        return demonstrations(found, most, least)
    raise unknown("kind of data", kind, ("preferences", "demonstrations", "steps"))
