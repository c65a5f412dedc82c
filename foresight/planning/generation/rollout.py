"""Text rollouts: prompts drawn from a task, groups of completions sampled for them, and their rewards."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foresight import distributed
from foresight.data.text import TokenBatch
from foresight.envs.text import curriculum
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.ops.advantage import differs
from foresight.planning.generation.decoding import Completer, generate
from foresight.planning.generation.dialogue import Dialogues
from foresight.planning.generation.multi_turn import converse

CANDIDATES = 16  # times as many prompts as an update has, of which the hardest are kept
ANSWERS = 1024  # prompts in a batch of answers; the sampler decides how many rows it decodes at once


class AnswerConfig(Protocol):
    """The fields of a Config for answers; a `temperature` is used too, if there is one."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum tokens of a completion."""


class SamplingConfig(AnswerConfig, Protocol):
    """The fields of a Config for sampled groups; a `group` is used too, if there is one."""

    @property
    def steps(self) -> int:
        """Total number of updates."""

    @property
    def prompts(self) -> int:
        """Prompts per update."""

    @property
    def temperature(self) -> float:
        """The sampling temperature."""


class FilteringConfig(SamplingConfig, Protocol):
    """`SamplingConfig`, where groups are sampled until enough of them pass a filter."""

    @property
    def max_batches(self) -> int:
        """Maximum batches of prompts per update."""


class AnswerState(Protocol):
    """A State that answers prompts."""

    policy: LanguageModel
    generator: torch.Generator

    @property
    def config(self) -> AnswerConfig:
        """The algorithm's Config."""


class Sampler(AnswerState, Protocol):
    """The State of an algorithm that trains on groups of sampled completions."""

    step: int

    @property
    def config(self) -> SamplingConfig:
        """The algorithm's Config."""


@runtime_checkable
class CountingSampler(Sampler, Protocol):
    """A `Sampler` that counts the right and wrong completions of every training example; None: not yet."""

    counts: curriculum.Counts | None


class FilteringSampler(Sampler, Protocol):
    """A `Sampler` that leaves out some groups."""

    @property
    def config(self) -> FilteringConfig:
        """The algorithm's Config."""


@dataclasses.dataclass(frozen=True)
class TextRollout:
    """P prompts with G completions each, and their rewards `[P, G]` (NaN: could not be scored).

    `examples` are the prompts and `answers` the completions as text; `batch` holds both as tokens. `measures` `[P, G]`
    are the parts of the rewards and other metrics of each completion, `transcripts` the messages of conversations, and
    `turns` the failed calls and the seconds of each of their turns. `counts` are metrics of the whole.
    """

    examples: list[Example]
    batch: TokenBatch
    answers: list[str]  # P · G texts, prompt by prompt
    rewards: Tensor
    measures: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    transcripts: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)
    turns: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    counts: dict[str, float] = dataclasses.field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """Metrics of the completions, and one sample of each prompt."""
        return {
            "reward": self.rewards.nanmean().item(),
            "length": self.batch.length.float().mean().item(),
            "truncated": 1 - self.batch.stopped.float().mean().item(),
            **{name: measure.nanmean().item() for name, measure in self.measures.items()},
            **self.counts,
            "samples": [self.sample(p) for p in range(len(self.examples))],
        }

    def sample(self, prompt: int) -> dict[str, Any]:
        """The first completion of a prompt as it is logged: with the parts of its reward, and its transcript."""
        first = prompt * self.rewards.shape[1]
        parts = {name: measure[prompt, 0].item() for name, measure in self.measures.items()}
        return {
            "prompt": self.examples[prompt].question,
            "completion": self.answers[first],
            "reward": self.rewards[prompt, 0].item(),
            **({"parts": parts} if parts else {}),
            **({"transcript": self.transcripts[first]} if self.transcripts else {}),
        }

    def select(self, prompts: Tensor) -> TextRollout:
        """The rollout of the prompts with the given indices."""
        group = self.rewards.shape[1]
        kept = prompts.tolist()
        answers = [answer for p in kept for answer in self.answers[p * group : (p + 1) * group]]
        measures = {name: measure[prompts] for name, measure in self.measures.items()}
        examples = [self.examples[p] for p in kept]
        transcripts = [one for p in kept for one in self.transcripts[p * group : (p + 1) * group]]
        turns = [one for p in kept for one in self.turns[p * group : (p + 1) * group]]
        rewards = self.rewards[prompts]
        return TextRollout(
            examples, self.batch.select(prompts), answers, rewards, measures, transcripts, turns, self.counts
        )


def concat(parts: Sequence[TextRollout]) -> TextRollout:
    """Several rollouts with the same group size as one. A measure that one lacks is NaN there."""
    names = dict.fromkeys(name for part in parts for name in part.measures)
    return TextRollout(
        [example for part in parts for example in part.examples],
        TokenBatch.concat([part.batch for part in parts]),
        [answer for part in parts for answer in part.answers],
        torch.cat([part.rewards for part in parts]),
        {
            name: torch.cat([part.measures.get(name, torch.full_like(part.rewards, math.nan)) for part in parts])
            for name in names
        },
        [transcript for part in parts for transcript in part.transcripts],
        [turns for part in parts for turns in part.turns],
    )


def complete(
    policy: LanguageModel,
    prompts: Sequence[Any],
    group: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    **options: Any,
) -> TokenBatch:
    """`group` completions of each prompt (a string, a conversation or an Example); temperature 0 is greedy.

    For `options` (`top_k`, `top_p`, `stop`, `choices`) see `planning.generation.decoding.generate`.
    """
    sampler: Completer = policy.completer or functools.partial(generate, policy)
    return sampler(_encode(policy, prompts), group, max_new_tokens, temperature, generator, **options)


def _encode(policy: LanguageModel, prompts: Sequence[Any]) -> list[list[int]]:
    return [policy.encode(p.prompt, p.tools) if isinstance(p, Example) else policy.encode(p) for p in prompts]


def texts(policy: LanguageModel, batch: TokenBatch) -> list[str]:
    """The completions of a batch as text, prompt by prompt."""
    rows, lengths = batch.completion.flatten(0, 1).tolist(), batch.length.flatten().tolist()
    return [policy.decode(row[:n]) for row, n in zip(rows, lengths, strict=True)]


def answer(
    state: AnswerState, obs: Sequence[Any], carry: None = None, explore: bool = False
) -> tuple[list[str], dict[str, Any], None]:
    """Answer prompts (strings, conversations or Examples) with one completion each: `act` of a language algorithm.

    Greedily or, with `explore`, at the Config's temperature (default 1) with the State's generator. The stop texts of
    training (`Example.stop`) apply.
    """
    config, generator = state.config, state.generator if explore else None
    temperature = getattr(config, "temperature", 1.0) if explore else 0.0
    stop = tuple(sorted({text for one in obs if isinstance(one, Example) for text in one.stop}))
    if state.policy.completer is not None:  # text is enough for answers, and some servers return only text
        prompts, few = _encode(state.policy, obs), config.max_new_tokens
        return state.policy.completer.answers(prompts, few, temperature, generator, stop=stop), {}, None
    starts = range(0, len(obs), ANSWERS)
    parts = [obs[i : i + ANSWERS] for i in starts]
    batches = [
        complete(state.policy, part, 1, config.max_new_tokens, temperature, generator, stop=stop) for part in parts
    ]
    return [text for batch in batches for text in texts(state.policy, batch)], {"batches": batches}, None


def check_group(group: int) -> None:
    """Raise UserError if a group has fewer than 2 completions to compare."""
    if group < 2:
        raise UserError(f"group must be at least 2, to compare the completions of a prompt, not {group}.")


def check_lengths(policy: LanguageModel, task: TextTask, config: object, name: str = "model") -> None:
    """Raise UserError, naming the example, if a prompt leaves no room in the context for `config.max_new_tokens`.

    Checked at the start of a run, for the prompts of evaluations and (if the Config has a temperature) of training.
    `name` is what the message calls the policy.
    """
    room = policy.context - getattr(config, "max_new_tokens", 0)
    sides = {"training": task.train} if hasattr(config, "temperature") else {}
    if task.grader is not None and hasattr(config, "max_new_tokens"):
        sides["held-out"] = task.test
    for side, examples in sides.items():
        for number, example in enumerate(examples, 1):
            text = example.prompt if isinstance(example.prompt, str) else "".join(m["content"] for m in example.prompt)
            if not example.tools and len(text.encode()) <= room // 2:  # a token is a byte or more, templates add little
                continue
            if (tokens := len(policy.encode(example.prompt, example.tools))) > room:
                raise UserError(
                    f"The {side} prompt {number} of '{task.name}' ({text[:40]!r}) has {tokens} tokens, and with "
                    f"{policy.context - room} new ones it does not fit into the {name}'s context of {policy.context}: "
                    "shorten it, leave it out, or lower max_new_tokens."
                )


def sample_groups(
    policy: LanguageModel,
    task: TextTask,
    prompts: int,
    group: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    progress: float = 1.0,
    examples: list[Example] | None = None,
) -> TextRollout:
    """Draw distinct training prompts, sample a group of completions of each, and grade them.

    `progress` in [0, 1] is the finished share of the run, which a curriculum draws by; given `examples` are not drawn.
    A policy with a `collector` gets the groups that it finished (`planning.generation.asynchronous`). Raises UserError
    if the task has fewer training prompts.
    """
    if policy.collector is not None:
        collected: TextRollout = policy.collector(
            task, prompts, group, max_new_tokens, temperature, generator, progress
        )
        return collected
    if examples is None:
        examples = draw(task, prompts, generator, progress)
    if task.episode is not None:
        found = converse(policy, task, examples, group, max_new_tokens, temperature, generator)
        return of_dialogues(task, examples, found)
    repeated = [example for example in examples for _ in range(group)]
    batch = complete(policy, examples, group, max_new_tokens, temperature, generator, stop=task.stop)
    answers = texts(policy, batch)
    rewards, parts = distributed.on_first(lambda: task.reward(repeated, answers))
    if task.curriculum < 1:
        parts["difficulty"] = [float(example.columns["difficulty"]) for example in repeated]
    measures = {name: torch.tensor(values).view(prompts, group) for name, values in parts.items()}
    return TextRollout(examples, batch, answers, torch.tensor(rewards).view(prompts, group), measures)


def draw(task: TextTask, prompts: int, generator: torch.Generator, progress: float = 1.0) -> list[Example]:
    """Distinct training prompts. Raises UserError if the task has fewer."""
    _require_prompts(task, prompts)
    pool = task.pool(progress, prompts)
    return [pool[i] for i in torch.randperm(len(pool), generator=generator)[:prompts].tolist()]


def of_dialogues(task: TextTask, examples: Sequence[Example], found: Dialogues) -> TextRollout:
    """Finished conversations about examples as a rollout; with several tasks, `outcome/TASK` is each one's.

    With `weights` of a task, the reward is the weighted sum of these parts, each of which is measured as `reward_PART`.
    """
    shape = found.batch.length.shape
    measures = {name: torch.tensor(values).view(shape) for name, values in found.parts.items()}
    for p, example in enumerate(examples):
        if name := example.columns.get("task", ""):
            own = measures.setdefault(f"outcome/{name}", torch.full(shape, math.nan))
            own[p] = measures["outcome"][p]
    rewards = measures.get("reward", measures["outcome"])  # less a cost, where an episode has one
    rewards = torch.where(rewards.isnan(), measures["outcome"], rewards)
    failed, seconds = ([sum(turn[i] for turn in turns) for turns in found.turns] for i in (0, 1))
    known = {"process": torch.tensor(failed).view(shape).float(), "time": torch.tensor(seconds).view(shape)}
    known["outcome"] = measures["outcome"]
    for p, example in enumerate(examples):
        if weights := example.columns.get("weights", task.weights):
            rewards[p] = sum(weight * known[part][p] for part, weight in weights.items())
            for part in weights:
                measures.setdefault(f"reward_{part}", torch.full(shape, math.nan))[p] = known[part][p]
    return TextRollout(list(examples), found.batch, found.texts, rewards, measures, found.transcripts, found.turns)


def _require_prompts(task: TextTask, prompts: int) -> None:
    if len(task.train) < prompts:
        raise UserError(f"prompts is {prompts}, but the task has {len(task.train)} training prompts: lower prompts.")


def sample(state: Sampler, task: TextTask) -> TextRollout:
    """`sample_groups` with the policy, generator and Config of a State (a Config without `group`: 1).

    With the `prompt_sampling` "learnability", prompts are drawn by the State's `counts` of their completions, to which
    these are added (`envs.text.curriculum`); with "hardest", by the rewards of their greedy answers.
    """
    sampling = getattr(state.config, "prompt_sampling", "uniform")
    if sampling == "uniform":
        return sample_groups(state.policy, task, *_arguments(state))
    if state.policy.collector is not None:
        raise UserError(
            f"prompt_sampling {sampling} needs the policy of an update before its prompts are drawn: leave out "
            "--staleness."
        )
    if sampling == "hardest":
        return _hardest(state, task)
    assert isinstance(state, CountingSampler)
    if task.curriculum < 1:
        raise UserError("A curriculum and prompt_sampling learnability both choose the prompts: leave one of them out.")
    _require_prompts(task, state.config.prompts)
    state.counts = curriculum.counts_of(task, state.counts)
    chosen = curriculum.by_learnability(state.counts.table, state.config.prompts, state.generator)
    rollout = sample_groups(state.policy, task, *_arguments(state), [task.train[i] for i in chosen])
    curriculum.count_(state.counts.table, chosen, rollout.rewards)
    return rollout


def _hardest(state: Sampler, task: TextTask) -> TextRollout:
    """Groups of the prompts whose greedy answers have the lowest rewards, of `CANDIDATES` times as many.

    The mean reward of these answers is a metric: unlike that of the groups, it is of prompts drawn uniformly.
    """
    arguments = prompts, _, max_new_tokens, _, generator, progress = _arguments(state)
    _require_prompts(task, prompts)
    count = min(CANDIDATES * prompts, len(task.pool(progress, prompts)))
    drawn = draw(task, count, generator, progress)
    greedy = sample_groups(state.policy, task, count, 1, max_new_tokens, 0.0, generator, progress, drawn).rewards[:, 0]
    hardest = greedy.nan_to_num(math.inf).argsort(stable=True)[:prompts].tolist()  # those drawn first where equal
    rollout = sample_groups(state.policy, task, *arguments, [drawn[i] for i in hardest])
    return dataclasses.replace(rollout, counts=rollout.counts | {"greedy_reward": greedy.nanmean().item()})


def sample_until(
    keep: Callable[[Tensor], Tensor], state: FilteringSampler, task: TextTask
) -> tuple[TextRollout, dict[str, float]]:
    """`sample` batches until as many groups as the Config has `prompts` pass `keep`, at most its `max_batches`.

    `keep(rewards [P, G])` returns which groups pass, bool `[P]`. If too few pass the rollout is smaller; if none does,
    it is the last batch unfiltered, and with `max_batches` of 1 it is the only one. Returns the rollout and metrics:
    the number of `batches` sampled, the share `filled` of the prompts, and of everything sampled, because the groups
    that passed are biased, the mean `reward` and the share `equal_reward_groups`; and the `counts` of all batches.

    If sampling fails, the `counts` of the State (see `sample`) are as before: a resumed run samples all batches again.
    """
    before = copy.deepcopy(getattr(state, "counts", None))
    try:
        return _sample_until(keep, state, task)
    except Exception:
        if isinstance(state, CountingSampler):
            state.counts = before
        raise


def _sample_until(
    keep: Callable[[Tensor], Tensor], state: FilteringSampler, task: TextTask
) -> tuple[TextRollout, dict[str, float]]:
    prompts, limit = state.config.prompts, state.config.max_batches
    passed: list[TextRollout] = []
    count, rewards, counts = 0, [], list[dict[str, float]]()
    for batches in range(1, limit + 1):  # noqa: B007
        rollout = sample(state, task)
        rewards.append(rollout.rewards)
        counts.append(rollout.counts)
        chosen = (keep(rollout.rewards) | (limit == 1)).nonzero()[:, 0][: prompts - count]
        count += len(chosen)
        passed += [rollout.select(chosen)] if len(chosen) else []
        if count == prompts:
            break
    sampled = torch.cat(rewards)
    metrics = _of_batches(counts) | {
        "reward": sampled.nanmean().item(),
        "equal_reward_groups": (~differs(sampled) & ~sampled.isnan().all(1)).float().mean().item(),
        "batches": float(batches),
        "filled": count / prompts,
    }
    return concat(passed) if passed and limit > 1 else rollout, metrics


def _of_batches(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The `counts` of several batches of one update: seconds of waiting are summed, others averaged."""
    rules: dict[str, Callable[[list[float]], float]] = {
        "waiting": sum, "max_staleness": max, "in_flight": lambda values: values[-1]
    }  # fmt: skip
    return {name: rules.get(name, statistics.fmean)([one[name] for one in counts]) for name in counts[0]}


def _arguments(state: Sampler) -> tuple[int, int, int, float, torch.Generator, float]:
    config = state.config
    sizes = config.prompts, getattr(config, "group", 1), config.max_new_tokens
    return *sizes, config.temperature, state.generator, state.step / config.steps
