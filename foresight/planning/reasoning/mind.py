"""Serving thoughts: methods ask for samples and scores, and every one is charged.

A method is a generator: it yields an `Ask` (samples that continue a prefix) or a `Check` (scores of texts), receives
the result, and returns an `Answer`. It reads like one question's algorithm, while `think` runs many questions side by
side and merges what they ask for into batches for the completer. Sampled tokens are never tokenized again: a prefix is
the token ids of the prompt and of the thoughts so far.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch

from foresight.envs.text.task import Example, TextTask
from foresight.errors import LostError, UserError
from foresight.nets.language.tokenizer import ids_of
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.prefix_cache import PrefixCache
from foresight.planning.reasoning.tree import ThoughtTree

Verifier = Callable[[Sequence[Example], Sequence[str]], Sequence[float]]  # of whole or partial completions, in [0, 1]
STEP_TOKENS = 48  # of one thought, by default


class Policy(Protocol):
    """What methods need of a language model (`nets.language.model.LanguageModel`, `generation.scripted.Scripted`)."""

    completer: Any
    context: int

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""

    def encode(self, prompt: Any, tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled ids."""


@dataclasses.dataclass(frozen=True)
class Thought:
    """A sampled continuation: text, token ids, the sum of their log-probabilities, and whether the answer ended."""

    text: str
    tokens: tuple[int, ...]
    logprob: float
    ended: bool


@dataclasses.dataclass(frozen=True)
class Ask:
    """`count` samples that continue each of the id sequences `prefixes`: a list of thoughts for each.

    Fewer, perhaps none, come back when the budget is short: first each gets fewer, then the last prefixes none.
    """

    prefixes: tuple[tuple[int, ...], ...]
    count: int = 1
    max_new_tokens: int | None = None  # None: the mind's
    stop: tuple[str, ...] = ()  # besides the task's
    temperature: float | None = None  # None: the mind's


@dataclasses.dataclass(frozen=True)
class Check:
    """The verifier's score of each text: a whole completion, or one up to and including a step."""

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A completion, the other candidates with their scores (best first), and the tree."""

    text: str
    candidates: tuple[tuple[str, float], ...]
    tree: ThoughtTree


@dataclasses.dataclass
class Charge:
    """What a question cost. `prompt_tokens` counts a prefix once for each request, as a server without a cache does.

    `distinct_tokens` counts every prefix of the prompts and samples once, as one cache for the whole question would.
    """

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    verifier_calls: int = 0
    seconds: float = 0.0
    distinct_tokens: int = 0

    def __add__(self, other: Charge) -> Charge:
        """The sum of two charges."""
        return Charge(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question as a method sees it."""

    example: Example
    prompt: tuple[int, ...]
    task: TextTask
    mind: Mind
    seen: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # of `grow`

    @property
    def delimiter(self) -> str:
        """The text that ends a step."""
        return self.task.delimiter

    def tree(self) -> ThoughtTree:
        """A new tree of the question."""
        return ThoughtTree(self.example.question)

    def key(self, completion: str) -> str:
        """What votes are counted under: the canonical answer of a completion; "" if it has none."""
        return self.task.answer_in(completion)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text that is put into a completion, such as "Wait"."""
        return self.mind.continuation(text)

    def message(self, text: str) -> tuple[int, ...]:
        """Ids of a new conversation with one message. Raises UserError if the model has no chat template."""
        return self.mind.message(text)

    @property
    def verified(self) -> bool:
        """Whether there is a verifier."""
        return self.mind.verifier is not None


Steps = Generator[Ask | Check, Any, Answer]
Method = Callable[..., Steps]


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer and what it cost."""

    answer: Answer
    charge: Charge


@dataclasses.dataclass
class Mind:
    """A model to think with: its samples, its verifier, and what all of it cost.

    `max_new_tokens` is the most of one sample: an answer or, in methods that join several, a part of one; `beam`,
    `dvts`, `tree_of_thoughts` and `puct` join steps of up to `step_tokens` each. `total` is the sum of all charges. A
    budget is the sampled tokens of a question: a request gets as many rows as the rest can pay for at their full
    length, and is charged what they used.
    """

    policy: Policy
    max_new_tokens: int = 64
    temperature: float = 1.0
    verifier: Verifier | None = None
    generator: torch.Generator = dataclasses.field(default_factory=lambda: torch.Generator().manual_seed(0))
    total: Charge = dataclasses.field(default_factory=Charge)
    kept: PrefixCache = dataclasses.field(default_factory=PrefixCache)  # of the thoughts of one `think`

    def think(
        self, method: Method, task: TextTask, examples: Sequence[Example], budget: int | None = None, **options: Any
    ) -> list[Result]:
        """Answer the examples with `method(problem, **options)`, each within `budget` sampled tokens (None: no limit).

        Raises UserError if the budget is below one answer or a prompt fills the context, and LostError if the verifier
        fails; both name the question.
        """
        problems = self.problems(task, examples, budget)
        running = [method(problem, **options) for problem in problems]
        charges = [Charge() for _ in problems]
        answers: list[Answer | None] = [None] * len(problems)
        replies: dict[int, Any] = dict.fromkeys(range(len(problems)))
        while replies:
            requests: dict[int, Ask | Check] = {}
            for i, reply in replies.items():
                try:
                    requests[i] = running[i].send(reply)
                except StopIteration as end:
                    answers[i] = end.value
            replies = self.serve(problems, requests, charges, budget)
        self.kept.clear()
        self.total = sum(charges, self.total)
        return [Result(a, c) for a, c in zip(answers, charges, strict=True) if a is not None]

    def problems(self, task: TextTask, examples: Sequence[Example], budget: int | None) -> list[Problem]:
        """The examples as methods see them, with no keys and values kept. Raises UserError as `think` does."""
        check_budget(budget, self.max_new_tokens)
        self.kept.clear()  # the weights may have changed
        found = [Problem(e, tuple(self.policy.encode(e.prompt, e.tools)), task, self) for e in examples]
        for problem in found:
            if len(problem.prompt) >= self.policy.context:
                raise UserError(
                    f"The prompt of the question {problem.example.question[:40]!r} has {len(problem.prompt)} tokens, "
                    f"which leaves no room for an answer in the context of {self.policy.context}: leave the question "
                    "out, or use a model with a longer context."
                )
        return found

    def serve(
        self,
        problems: Sequence[Problem],
        requests: dict[int, Ask | Check],
        charges: Sequence[Charge],
        budget: int | None,
    ) -> dict[int, Any]:
        """The reply to each request, and its charge."""
        replies: dict[int, Any] = {}
        asks: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        checks = [i for i, request in requests.items() if isinstance(request, Check)]
        for i, request in requests.items():
            if isinstance(request, Check):
                continue
            longest = max(map(len, request.prefixes), default=0)
            most = min(request.max_new_tokens or self.max_new_tokens, self.policy.context - longest)
            most = most if budget is None else min(most, budget)  # longer ones could never be paid for
            rows = len(request.prefixes)
            left = rows * request.count if budget is None else (budget - charges[i].sampled_tokens) // max(most, 1)
            few, count = min(rows, left), min(request.count, left // max(rows, 1)) or 1
            replies[i] = [[] for _ in range(rows)]
            if most < 1 or few < 1:
                continue
            temperature = self.temperature if request.temperature is None else request.temperature
            asks.setdefault((count, most, temperature, request.stop, problems[i].example.stop), []).append((i, few))
        for (count, most, temperature, stop, ending), group in asks.items():
            began = time.perf_counter()
            prefixes = [(i, prefix) for i, few in group for prefix in requests[i].prefixes[:few]]  # type: ignore[union-attr]
            copies = _copies(prefixes)  # searches apart start from one prefix: it is read once
            unique = [prefix for _, prefix in prefixes[::copies]]
            sampled = self.sample(unique, count * copies, most, temperature, (*stop, *ending), ending)
            found = iter(row[start : start + count] for row in sampled for start in range(0, len(row), count))
            seconds = (time.perf_counter() - began) / len(prefixes)
            for i, few in group:
                thoughts = list(itertools.islice(found, few))
                replies[i][:few] = thoughts
                read: Any = requests[i]
                charges[i].prompt_tokens += sum(map(len, read.prefixes[:few])) // copies
                charges[i].sampled_tokens += sum(len(thought.tokens) for row in thoughts for thought in row)
                charges[i].requests += few // copies
                for prefix, row in zip(read.prefixes[:few], thoughts, strict=True):
                    node, new = grow(problems[i].seen, prefix)
                    charges[i].distinct_tokens += new + sum(grow(node, thought.tokens)[1] for thought in row)
                charges[i].seconds += few * seconds
        if checks:
            began = time.perf_counter()
            texts = [(problems[i].example, text) for i in checks for text in requests[i].texts]  # type: ignore[union-attr]
            scores = iter(self._scores(texts))
            seconds = (time.perf_counter() - began) / len(checks)
            for i in checks:
                count = len(requests[i].texts)  # type: ignore[union-attr]
                replies[i] = list(itertools.islice(scores, count))
                charges[i].verifier_calls += count
                charges[i].seconds += seconds
        return {i: replies[i] for i in requests}

    def sample(
        self,
        prefixes: Sequence[Sequence[int]],
        count: int,
        max_new_tokens: int,
        temperature: float,
        stop: Sequence[str] = (),
        ending: Sequence[str] = (),
    ) -> list[list[Thought]]:
        """`count` continuations of each prefix, up to a text of `stop`; those of `ending` end the whole answer."""
        completer = self.policy.completer
        if hasattr(completer, "choices"):  # a server: any temperature, and perhaps only texts
            chosen = completer.choices(prefixes, count, max_new_tokens, temperature, self.generator, stop=tuple(stop))
            rows = [self._chosen(choice, stop, ending) for choice in chosen]
            return [rows[i : i + count] for i in range(0, len(rows), count)]
        local: Any = self.policy
        # A whole answer is not continued: only thoughts are kept.
        kept = self.kept if set(stop) - set(ending) or max_new_tokens < self.max_new_tokens else None
        sampler = completer or functools.partial(generate, local, kept=kept)
        batch = sampler(prefixes, count, max_new_tokens, temperature, self.generator, stop=tuple(stop))
        found = list[list[Thought]]()
        for p in range(len(prefixes)):
            found.append([])
            for g in range(count):
                n = int(batch.length[p, g])
                ids = tuple(batch.completion[p, g, :n].tolist())
                text = self.policy.decode(ids)
                ended = ids[-1] in self.policy.stop_ids or contains(text, ending)
                logprob = float(batch.logprob[p, g, :n].sum())
                found[-1].append(Thought(text, ids, logprob, bool(batch.stopped[p, g]) and ended))
        return found

    def _chosen(self, choice: Any, stop: Sequence[str], ending: Sequence[str]) -> Thought:
        """A server's choice as a thought. Of text alone the ids are those of our own tokenizer.

        Raises UserError if the server does not tell whether a text of `stop` ended a step, or the answer ended.
        """
        server = self.policy.completer
        if choice.stop is None and set(stop) - set(ending):
            raise UserError(
                f"{server.root} returns neither the text that stopped a completion nor which one did, so the end of a "
                "step and that of an answer look alike: use a server that reports it, as vLLM and SGLang do, or a "
                "method without steps, such as self_consistency or best_of_n."
            )
        text = server.text(choice, stop)
        if choice.tokens is None:
            tokens = self.continuation(text)
        else:
            tokens = (*choice.tokens, *self.continuation(text[len(self.policy.decode(choice.tokens)) :]))
        within = choice.stop and choice.stop not in ending and not contains(text, ending)
        return Thought(text, tokens, sum(choice.logprobs or ()), choice.stopped and not within)

    def _scores(self, pairs: Sequence[tuple[Example, str]]) -> Sequence[float]:
        if self.verifier is None:
            raise UserError(
                "This method needs a verifier: give --verifier exact (if the task has one), --verifier FOLDER (the "
                "export of a reward model), or another method."
            )
        examples, texts = [example for example, _ in pairs], [text for _, text in pairs]
        try:
            scores = [float(score) for score in self.verifier(examples, texts)]
        except UserError:
            raise
        except Exception as error:
            raise self._blame(pairs, error) from error
        if len(scores) != len(texts) or any(score != score for score in scores):
            raise LostError(
                f"The verifier returned {len(scores)} scores for {len(texts)} texts, or one that is not a number: "
                "return one finite number for each."
            )
        return scores

    def _blame(self, pairs: Sequence[tuple[Example, str]], error: Exception) -> LostError:
        """Find the text on which the verifier fails, to name it in the error."""
        for example, text in pairs:
            try:
                self.verifier([example], [text])  # type: ignore[misc]
            except Exception as single:
                return LostError(
                    f"The verifier raised {type(single).__name__}: {single}, on {text!r} for {example.question!r}."
                )
        return LostError(f"The verifier raised {type(error).__name__}: {error}.")

    def continuation(self, text: str) -> tuple[int, ...]:
        """Ids of a text in the middle of a completion."""
        tokenizer = getattr(self.policy, "tokenizer", None)
        ids = self.policy.encode(text) if tokenizer is None else ids_of(tokenizer, text, add_special_tokens=False)
        return tuple(ids)

    def message(self, text: str) -> tuple[int, ...]:
        """Ids of a conversation with one message. Raises UserError if the model has no chat template."""
        tokenizer = getattr(self.policy, "tokenizer", None)
        chat = getattr(self.policy, "chat", False) if tokenizer is None else tokenizer.chat_template is not None
        if not chat:
            raise UserError(
                "This method asks the model in words, and the model has no chat template: give a model that has one, "
                "or --verifier, so that it need not be asked."
            )
        return tuple(self.policy.encode(text))


def _copies(prefixes: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    """How often each prefix of each question follows itself, if all do so equally often; else 1."""
    runs = {len(list(same)) for _, same in itertools.groupby(prefixes)}
    return runs.pop() if len(runs) == 1 else 1


def contains(text: str, ends: Sequence[str]) -> bool:
    """Whether a text has one of `ends`. A sample stops at the first, but the token that completes it may hold more."""
    return any(end in text for end in ends)


def grow(tree: dict[int, Any], tokens: Sequence[int]) -> tuple[dict[int, Any], int]:
    """Add a row to a prefix tree, a dict from each token to what follows: its last node, and the number of new ones."""
    new = 0
    for token in tokens:
        if token not in tree:
            tree[token], new = {}, new + 1
        tree = tree[token]
    return tree, new


def check_budget(budget: int | None, max_new_tokens: int) -> None:
    """Raise UserError unless a budget pays for one answer."""
    if budget is not None and budget < max_new_tokens:
        raise UserError(
            f"The budget is {budget} tokens, which is below one answer of up to {max_new_tokens}: raise --budget, or "
            "lower --max-new-tokens."
        )


def samples(
    problem: Problem, count: int, prefix: tuple[int, ...] | None = None, **options: Any
) -> Generator[Ask | Check, Any, list[Thought]]:
    """Up to `count` samples: what the rows of a request leave of the budget pays for more."""
    found = list[Thought]()
    while len(found) < count:
        start = problem.prompt if prefix is None else prefix
        more = yield Ask((start,), count - len(found), **options)
        if not more[0]:
            break
        found += more[0]
    return found


def score(problem: Problem, texts: Sequence[str]) -> Generator[Ask | Check, Any, list[float]]:
    """The verifier's score of each text; equal texts are scored once."""
    unique = tuple(dict.fromkeys(texts))
    if not unique:
        return []
    found = yield Check(unique)
    scores: dict[str, float] = dict(zip(unique, found, strict=True))
    return [scores[text] for text in texts]
