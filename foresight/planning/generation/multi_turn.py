"""Multi-turn rollouts: how conversations (`dialogue`) are sampled.

Conversations do not wait for one another's tokens: each has a slot of the batch that is decoded, with its keys and
values, from its first turn to its last, and reads at once what the environment writes. An environment that is `slow`
answers in a thread, and only its own slot rests; for any other, all wait. A conversation that ends gives its slot to
the next one. With a server, each conversation sends its own requests. Only models that cannot share prefixes take turns
in rounds. Conversations are held in one process.

The conversations of sub-agents are rows of the same batch. The one that delegated gives its slot to others, and is read
again when the last of its sub-agents has ended.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.packed import PACK, packed
from foresight.planning.generation import constraints
from foresight.planning.generation.continuous_batching import ContinuousBatchScheduler
from foresight.planning.generation.decoding import SLOTS, Completer, check, generate
from foresight.planning.generation.dialogue import Dialogue, Dialogues, begin, canceled, end_turn, gather, in_team, join
from foresight.planning.generation.sampling import choose

THREADS = 16  # slow environments that answer at once
REQUESTS = 64  # conversations with a server at once
CACHED = 32_768  # tokens of conversations in slots, if each takes all its turns and environments write as much


def converse(
    policy: LanguageModel,
    task: TextTask,
    examples: Sequence[Example],
    group: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Dialogues:
    """`group` conversations about each example; a turn has at most `max_new_tokens` tokens, temperature 0 is greedy.

    Besides the parts of the episodes, `turns` is the number of the model's turns, and with a limit of seconds `late` is
    1 where the environment took longer: its outcome is 0. A conversation that another limit ends keeps the outcome that
    its environment gives it then. Raises UserError for a model without a chat template, and for a first prompt that
    does not fit into the context; LostError for an environment whose reward is none, or that does not begin in time.
    """
    rows = begin(policy, task, examples, group)
    settings = group, max_new_tokens, temperature, generator
    if policy.completer is None and policy.capabilities.shared:
        hold(
            policy, task, rows, group, max_new_tokens, temperature, draws(task, rows, group, max_new_tokens, generator)
        )
    elif getattr(policy.completer, "concurrent", False):
        _requests(policy, task, rows, *settings)
    else:
        _rounds(policy, task, rows, *settings)
    return gather(rows, group)


def draws(
    task: TextTask, rows: Sequence[Dialogue], group: int, max_new_tokens: int, generator: torch.Generator | None
) -> Tensor:
    """The random numbers of conversations, `[rows, tokens]`, each of which decides one sampled token."""
    shape, later = (len(rows) // group, group, max_new_tokens), (task.turns - 1) * max_new_tokens
    first = torch.rand(shape, generator=generator).view(len(rows), -1)
    return torch.cat([first, torch.rand(len(rows), later, generator=generator)], 1)


@torch.no_grad()
def hold(
    policy: LanguageModel,
    task: TextTask,
    rows: Sequence[Dialogue],
    group: int,
    max_new_tokens: int,
    temperature: float,
    uniform: Tensor,
    ended: Callable[[int], object] = lambda row: None,
) -> None:
    """Hold all conversations, each in a slot of its own, with the numbers `uniform` of `draws`.

    A token depends on its row and place, not on the batching. `ended(row)` is called as soon as a conversation ends;
    one that another thread cuts ends too.
    """
    prompts = [row.prompt for row in rows[::group]]
    check(policy, prompts, group, max_new_tokens, temperature, stop=task.stop)
    team, number, rows = any(map(in_team, rows)), {id(row): i for i, row in enumerate(rows)}, list(rows)
    for each, numbers in zip(rows, uniform, strict=True):
        each.draws = numbers.tolist()
    most = CACHED // (2 * task.turns * max_new_tokens)
    slots = min(SLOTS if policy.device.type == "cpu" else 8 * SLOTS, max(most, 8), max(len(rows), 8 * team))
    answers: dict[int, Future[None]] = {}  # of slow environments, by row
    lock = threading.Lock()
    decoded = task.turns * max_new_tokens * -(-len(rows) // slots)  # steps, at most: slots are filled again
    kind = policy.autocast if decoded >= PACK else None
    with ThreadPoolExecutor(THREADS) as pool, policy.precision(), packed(kind, slots, policy.module):
        scheduler = ContinuousBatchScheduler(policy, prompts, group, slots, policy.context - min(map(len, prompts)))
        if team:  # rows are added, each with a prompt of its own
            scheduler = ContinuousBatchScheduler(policy, prompts[:1], 1, 1, policy.context)
            scheduler.grow(slots)
            for one in rows[1:]:
                scheduler.add(one.prompt)
        while scheduler.fill():
            active = [(slot, row) for slot, row in enumerate(scheduler.row.tolist()) if row >= 0 and row not in answers]
            if not active:
                wait(answers.values(), return_when=FIRST_COMPLETED)
            new = [(slot, row) for slot, row in active if rows[row].fed == len(rows[row].tokens)]
            if new:
                at = torch.tensor([slot for slot, _ in new], device=policy.device)
                drawn = torch.tensor([rows[row].draws[rows[row].sampled] for _, row in new]).to(policy.device)
                tokens, logprobs = choose(policy.logits(scheduler.hidden[at]), drawn, temperature)
                for (_, row), token, logprob in zip(new, tokens.tolist(), logprobs.tolist(), strict=True):
                    one = rows[row]
                    one.clock = one.clock or time.monotonic()
                    one.tokens.append(token)
                    one.logprob.append(logprob)
                    one.own.append(True)
                    one.sampled += 1
                    turn = one.tokens[one.begun :]
                    stopped = token in policy.stop_ids or bool(
                        task.stop and constraints.stops_at(policy, turn, task.stop)
                    )
                    if stopped or len(turn) >= one.room(policy.context, max_new_tokens) or canceled(one):
                        end = functools.partial(end_turn, policy, one, stopped, max_new_tokens, lock)
                        if stopped and getattr(one.episode, "slow", False):
                            answers[row] = pool.submit(end)
                        else:
                            end()
            read = {row for _, row in active if row not in answers and len(rows[row].tokens) > rows[row].fed + 1}
            over = [slot for slot, row in active if row not in answers and (rows[row].done or rows[row].waiting)]
            longer = [(slot, rows[row]) for slot, row in active if row in read and slot not in over]
            steps = [(slot, rows[row]) for slot, row in active if row not in read and slot not in over]
            if steps:
                fed = torch.tensor([one.tokens[one.fed] for _, one in steps])
                scheduler.step(fed, torch.tensor([slot for slot, _ in steps]))
            for _, one in steps:
                one.fed += 1
            for slot, one in longer:  # after the step, which changes the hidden states of all slots
                scheduler.extend(slot, one.tokens[one.fed :])
                one.fed = len(one.tokens)
            for row in [row for row, answer in answers.items() if answer.done()]:
                answers.pop(row).result()
                left = rows[row].done or rows[row].waiting
                over += [slot for slot, held in enumerate(scheduler.row.tolist()) if held == row and left]
            if over:
                finished = [rows[row] for row in scheduler.row[over].tolist()]
                scheduler.free(torch.tensor(over))
                for one in finished:
                    for following in follow(policy, one, max_new_tokens, lock):
                        following.draws = following.draws or _draws(one, following, task.turns * max_new_tokens)
                        following.fed = len(following.tokens)
                        rows.append(following)
                        scheduler.add([*following.prompt, *following.tokens])
                    while one.parent is not None and one.done:
                        one = one.parent  # a manager may end with its sub-agent
                    if one.done:
                        ended(number[id(one)])


def _requests(
    policy: LanguageModel,
    task: TextTask,
    rows: Sequence[Dialogue],
    group: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> None:
    """Hold conversations with a server, each in a thread; the tokenizer is used by one at a time."""
    seeds = torch.randint(2**31 - 1, (len(rows),), generator=generator).tolist()
    policy.completer.deliver()
    lock = threading.Lock()

    def hold(row: Dialogue, seed: int) -> None:
        own = torch.Generator().manual_seed(seed)
        while not row.done:
            row.clock = row.clock or time.monotonic()
            prompt, room = [row.prompt + row.tokens], row.room(policy.context, max_new_tokens)
            batch = policy.completer(prompt, 1, room, temperature, own, stop=task.stop)
            with lock:
                _add(row, batch, 0)
            end_turn(policy, row, bool(batch.stopped[0, 0]), max_new_tokens, lock)
            if row.waiting:
                new = [one for one in row.members if not one.done]
                with ThreadPoolExecutor(len(new)) as members:
                    list(members.map(hold, new, [hash((seed, *one.path)) % 2**63 for one in new]))
                join(policy, row, max_new_tokens, lock)

    with ThreadPoolExecutor(min(REQUESTS, len(rows))) as pool:
        list(pool.map(hold, rows, seeds))


def _rounds(
    policy: LanguageModel,
    task: TextTask,
    rows: Sequence[Dialogue],
    group: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> None:
    """Hold all conversations, which take their turns together."""
    sampler: Completer = policy.completer or functools.partial(generate, policy)
    first, live = True, list(rows)
    while live:
        following = list[Dialogue]()
        for room in sorted({row.room(policy.context, max_new_tokens) for row in live}):
            few = [row for row in live if row.room(policy.context, max_new_tokens) == room]
            count = group if first and len(few) == len(rows) else 1  # these share the computation of their prompt
            prompts = [row.prompt + row.tokens for row in few[::count]]
            for row in few:
                row.clock = row.clock or time.monotonic()
            batch = sampler(prompts, count, room, temperature, generator, stop=task.stop)
            for number, row in enumerate(few):
                _add(row, batch, number)
                end_turn(policy, row, bool(batch.stopped.flatten()[number]), max_new_tokens)
                following += follow(policy, row, max_new_tokens) if row.done or row.waiting else [row]
        first, live = False, following


def _add(row: Dialogue, batch: TokenBatch, number: int) -> None:
    """Add the tokens of row `number` of a batch to a conversation."""
    length = int(batch.length.flatten()[number])
    row.tokens += batch.completion.flatten(0, 1)[number, :length].tolist()
    row.logprob += batch.logprob.flatten(0, 1)[number, :length].tolist()
    row.own += [True] * length
    row.sampled += length


def follow(
    policy: LanguageModel, row: Dialogue, max_new_tokens: int, lock: threading.Lock | None = None
) -> list[Dialogue]:
    """The conversations whose turn it is when `row` waits for sub-agents or has ended: these, or who waited for it."""
    if row.waiting:
        return [one for one in row.members if not one.done]
    parent = row.parent
    if parent is None:
        return []
    parent.waiting -= 1
    if parent.waiting:
        return []
    if not parent.done:
        join(policy, parent, max_new_tokens, lock)
    return follow(policy, parent, max_new_tokens, lock) if parent.done else [parent]


def _draws(before: Dialogue, row: Dialogue, count: int) -> list[float]:
    """The random numbers of a sub-agent, from the last one of who delegated: they do not depend on when."""
    generator = torch.Generator().manual_seed(hash((before.draws[-1], *row.path)) % 2**63)
    numbers: list[float] = torch.rand(count, generator=generator).tolist()
    return numbers
