"""Decoding: prompts in, sampled token rows out, with the log-probabilities under which they were sampled.

What prompts share is read once a batch, and a prompt once a group; a row that ends gives its slot to the next one, so
that short rows never wait for long ones. One uniform number decides each token, so the result depends on the generator
alone and not on how rows were batched. The weights that sample are the model's own: nothing is copied, and the next
call samples from what the last update made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foresight.data.text import TokenBatch, common_prefix, pad
from foresight.errors import UserError
from foresight.nets.language.model import Cache, LanguageModel, Level, Seats
from foresight.nets.language.packed import PACK, packed
from foresight.ops.tokens import token_logprob
from foresight.planning.generation import constraints
from foresight.planning.generation.plain import Rows

SLOTS = 64  # rows that are decoded at once on a CPU: with more, a token costs no less
PLACES = 32  # tokens by which the memory of the slots grows, or by half
READ = 4096  # tokens of prompts that are read at once
WORTH = 8  # prompts are read when this part of the slots is free: reading few costs as much as reading many
NUCLEUS = 512  # tokens among which a nucleus is looked for at first
AT_ONCE = 1 << 20  # weights of a few rows, which a processor's cache holds from one pass to the next
BLOCK = 128  # weights that are summed up before one of them is looked for


class Completer(Protocol):
    """Whoever completes prompts of token ids: a model in this process (`generate`), or a server
    (`planning.generation.server`).

    Returns a TokenBatch `[P, G]` of the ids that were sampled, which nobody tokenizes again.
    """

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        group: int = 1,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> TokenBatch:
        """`group` completions of each prompt, see `generate`."""
        ...


def choose(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Pick a token a row by inverting the cumulative distribution. Logits `[B, V]`, uniform `[B]` in [0, 1).

    Temperature 0 is greedy. Of softmax(z / temperature) the `top_k` likeliest tokens are kept (0: all), and of those
    the fewest that have the probability `top_p` together (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    Returns tokens `[B]` and their log-probabilities `[B]` under the distribution sampled from (under the model's own,
    where greedy).
    """
    if temperature == 0.0:
        scaled = logits.float()
        token = scaled.argmax(-1)
        return token, scaled.gather(-1, token[:, None])[:, 0] - scaled.logsumexp(-1)
    scaled = logits if temperature == 1.0 else logits.float() / temperature
    if top_k or top_p < 1:
        kept, index = _truncated(scaled.float(), top_k, top_p)
        place, logprob = _drawn(kept, uniform)
        return index.gather(-1, place[:, None])[:, 0], logprob
    rows = max(1, AT_ONCE // scaled.shape[-1]) if scaled.device.type == "cpu" else len(scaled)
    drawn = [_drawn(*part) for part in zip(scaled.split(rows), uniform.split(rows), strict=True)]
    place, logprob = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return place, logprob


def _drawn(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A place of softmax(logits `[B, N]`) and its log-probability, `[B]` each, in float32."""
    weights = (logits - logits.amax(-1, keepdim=True).float()).exp_()
    place, total = _invert(weights, uniform)
    return place, (weights.gather(-1, place[:, None])[:, 0] / total).log()


def _truncated(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The logits that are kept, likeliest first and -inf beyond the nucleus, and their tokens: `[B, K]` each."""
    vocabulary = scaled.shape[-1]
    for width in (min(top_k or NUCLEUS, vocabulary), vocabulary):
        kept, index = scaled.topk(width)
        whole = (kept if top_k else scaled).logsumexp(-1, keepdim=True)
        share = (kept - whole).exp().cumsum(-1)
        if top_k or bool((share[:, -1] >= top_p).all()):
            break
    before = functional.pad(share[:, :-1], (1, 0))
    return kept.masked_fill((before >= top_p) & (top_p < 1), -torch.inf), index


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of each row of weights `[B, N]` exceeds `uniform` of the whole, and the whole, `[B]` each.

    First among sums of blocks and then within a block: one pass over the weights. Never a weight of 0.
    """
    beyond = -weights.shape[-1] % BLOCK
    blocks = (functional.pad(weights, (0, beyond)) if beyond else weights).view(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).cumsum(-1)
    target = uniform.to(sums)[:, None] * sums[:, -1:]
    block = _first(sums, target)
    passed = functional.pad(sums, (1, 0)).gather(-1, block)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    return (block * BLOCK + _first(within, target - passed))[:, 0], sums[:, -1]


def _first(sums: Tensor, target: Tensor) -> Tensor:
    """Where rising sums `[B, N]` first exceed the target `[B, 1]`, which rounding may have put outside: `[B, 1]`."""
    below_all = torch.nextafter(sums[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(sums, target.clamp(min=0).minimum(below_all), right=True)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    group: int = 1,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    choices: Sequence[str] | Sequence[Sequence[str]] | None = None,
    slots: int | None = None,
) -> TokenBatch:
    """Sample `group` completions of each prompt, up to a stop token, a text of `stop`, or `max_new_tokens`.

    - `temperature`, `top_k`, `top_p`: see `choose`;
    - `stop`: texts that end a row, wherever tokens begin and end; the row keeps the token that completed one;
    - `choices`: the only answers there are, a list for all prompts or one for each (see
      `planning.generation.constraints`);
    - `slots`: rows that are decoded at once; by default 64 on a CPU, and 512 elsewhere.

    Returns a TokenBatch of `[P, G]` rows, whose `logprob` is that of the distribution sampled from (truncated and
    constrained) and whose `model_logprob` that of the model itself. Raises UserError if a prompt leaves no room in the
    context, or if an answer does not fit into `max_new_tokens`.
    """
    _check(model, prompts, group, max_new_tokens, temperature, top_k, top_p, stop)
    tries = None if choices is None else constraints.tries(model, choices, len(prompts))
    if tries is not None and (longest := max(map(constraints.depth, tries))) > max_new_tokens:
        raise UserError(f"The longest choice has {longest} tokens with its end: raise max_new_tokens to that.")
    count, device = len(prompts) * group, model.device
    uniform = torch.rand(len(prompts), group, max_new_tokens, generator=generator).view(count, -1)
    completion = torch.zeros(count, max_new_tokens, dtype=torch.int64)
    logprob, model_logprob = torch.zeros(count, max_new_tokens), torch.zeros(count, max_new_tokens)
    length, stopped = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    stops = torch.tensor(model.stop_ids, dtype=torch.int64)
    nodes = [] if tries is None else [trie for trie in tries for _ in range(group)]
    same = tries is None and not top_k and top_p >= 1 and temperature in (0.0, 1.0)  # as the model's own distribution

    slots = min(slots or (SLOTS if device.type == "cpu" else 8 * SLOTS), count)
    kind = model.autocast if max_new_tokens >= PACK and model.way.shared else None
    with model.precision(), packed(kind, slots, model.module):
        table: _Slots | Rows = (
            _Slots(model, prompts, group, slots, max_new_tokens)
            if model.way.shared
            else Rows(model, prompts, group, slots)
        )
        while table.fill():
            live = table.live()
            rows = table.row[live]
            place = length[rows]
            logits = model.logits(table.hidden[live.to(device)])
            allowed = logits if tries is None else constraints.only(logits, [nodes[row] for row in rows.tolist()])
            token, logp = choose(allowed, uniform[rows, place].to(device), temperature, top_k, top_p)
            model_logprob[rows, place] = (logp if same else token_logprob(logits, token)[0]).cpu()
            token = token.cpu()
            completion[rows, place], logprob[rows, place] = token, logp.cpu()
            length[rows] += 1
            for row, sampled in zip(rows.tolist(), token.tolist(), strict=True) if nodes else ():
                nodes[row] = nodes[row][sampled]
            ended = torch.isin(token, stops)
            if stop:
                ends = [row[:n] for row, n in zip(completion[rows].tolist(), length[rows].tolist(), strict=True)]
                ended |= torch.tensor([constraints.stops_at(model, row, stop) for row in ends])
            stopped[rows] = ended
            table.free(live[ended | (length[rows] == max_new_tokens)])
            table.step(token[table.row[live] >= 0])
    width = int(length.max())
    prompt, prompt_length = pad(prompts)
    shape = (len(prompts), group, width)
    return TokenBatch(
        prompt,
        prompt_length,
        completion[:, :width].view(shape),
        length.view(len(prompts), group),
        logprob[:, :width].view(shape),
        stopped.view(len(prompts), group),
        model_logprob[:, :width].view(shape),
    )


def _check(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    group: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop: Sequence[str],
) -> None:
    if min(group, max_new_tokens) < 1 or not temperature >= 0:
        raise UserError(
            f"group and max_new_tokens must be at least 1 and temperature at least 0, but they are {group}, "
            f"{max_new_tokens} and {temperature}."
        )
    if not prompts or not all(prompts):
        raise UserError("There is nothing to complete: give at least one prompt, and each at least one token.")
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"stop is a list of texts that are not empty, but is {stop!r}.")
    if top_k < 0 or not 0 < top_p <= 1:
        raise UserError(f"top_k must be 0 (all) or more and top_p in (0, 1], but they are {top_k} and {top_p}.")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > model.context:
        raise UserError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the model's context of "
            f"{model.context}: shorten the prompt or lower max_new_tokens."
        )


class _Slots:
    """The rows being decoded, each in a slot of a static cache until it ends; then the next of the queue has it.

    A token sees three levels: the stem that all prompts begin with, its prompt, and its own row. A prompt stands in
    memory once, however many slots its group has: each slot knows its prompt's place, and the place is free when the
    whole group has ended. A prompt with one row becomes the beginning of that row, as two levels cost less than three.
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Sequence[int]], group: int, slots: int, places: int
    ) -> None:
        self.model, self.group, self.alone = model, group, group == 1
        self.total = len(prompts) * group
        shared = common_prefix(prompts) if len(prompts) > 1 else 0
        self.stem: Cache | None = None
        if shared:
            stem = torch.tensor([list(prompts[0][:shared])], device=model.device)
            self.stem = model(stem, torch.tensor([shared], device=model.device))[1]
        self.shared, self.prompts = shared, [list(prompt[shared:]) for prompt in prompts]
        self.limit = places + (max(map(len, self.prompts)) if self.alone else 0)
        count = min(slots, self.total)
        self.row = torch.full((count,), -1)  # which row of the batch each slot has; -1: none
        self.owner = torch.zeros(count, dtype=torch.int64)  # the place of its prompt
        self.filled = torch.zeros(count, dtype=torch.int64)  # its tokens in the cache, its prompt's where it is alone
        self.next = 0  # the first row of the queue
        self.place: dict[int, int] = {}  # of each prompt that has rows to come or in slots
        self.width = torch.zeros(0, dtype=torch.int64)  # tokens of the prompt at each place
        self.above: Level | None = None  # the prompts, as the slots see them now
        self.hidden = self.last = torch.zeros(0)  # of each slot, and of each prompt at its end
        self.read_level, self.own = Level([], []), Level([], [])

    def live(self) -> Tensor:
        """The slots that have a row."""
        return (self.row >= 0).nonzero()[:, 0]

    def fill(self) -> bool:
        """Give free slots to the queue, as long as it pays, and say whether there is a row."""
        while self.next < self.total:
            free = (self.row < 0).nonzero()[:, 0].tolist()
            for slot in free:
                if self.next == self.total or self.next // self.group not in self.place:
                    break
                self._seat(slot, self.next)
                self.next += 1
            free = (self.row < 0).nonzero()[:, 0].tolist()
            if self.next == self.total or WORTH * len(free) < len(self.row):
                break
            self._read(-(-len(free) // self.group))
        if self.next == self.total:
            self.drop()
        return bool((self.row >= 0).any())

    def free(self, slots: Tensor) -> None:
        """The rows in these slots have ended."""
        self.row[slots], self.filled[slots] = -1, 0

    def step(self, tokens: Tensor) -> None:
        """The tokens just sampled enter the cache, one for each slot that has a row."""
        live = self.live()
        if not len(live):
            return
        device = self.model.device
        entered = torch.zeros(len(self.row), dtype=torch.int64)
        entered[live] = tokens
        self._make_room(int(self.filled.max()) + 1)
        stem = [] if self.stem is None else self.stem.levels
        levels = stem if self.alone else [*stem, self._above()]
        begun = self.shared if self.alone else self.shared + self.width[self.owner]
        cache = Cache(levels, torch.as_tensor(begun).expand(len(self.row)).to(device))
        self.hidden = self.model.step(entered.to(device), cache, self.own, self.filled.to(device))
        self.filled[live] += 1

    def drop(self) -> None:
        """Where nothing waits: leave out slots without a row, and prompts without a slot, once it is worth the copy."""
        live = self.live()
        if len(live) > 0.75 * len(self.row):
            return
        places, owner = self.owner[live].unique(return_inverse=True)
        self.own, self.read_level = _rows(self.own, live), _rows(self.read_level, places)
        self.hidden = self.hidden[live.to(self.hidden.device)]
        self.row, self.filled, self.owner, self.width = self.row[live], self.filled[live], owner, self.width[places]
        self.above = None

    def _seat(self, slot: int, row: int) -> None:
        place = self.place[row // self.group]
        self.row[slot], self.owner[slot], self.filled[slot] = row, place, 0
        self.hidden[slot], self.above = self.last[place], None
        if self.alone:
            self.filled[slot] = width = int(self.width[place])
            self._make_room(width)
            for own, read in ((self.own.keys, self.read_level.keys), (self.own.values, self.read_level.values)):
                for mine, prompt in zip(own, read, strict=True):
                    mine[slot, :, :width] = prompt[place, :, :width]

    def _read(self, count: int) -> None:
        """Read the next prompts of the queue, so many or as many as there are, to places that are free."""
        held = {self.owner[slot].item() for slot in self.live().tolist()}
        self.place = {p: place for p, place in self.place.items() if place in held}
        first, longest = self.next // self.group, max(len(prompt) for prompt in self.prompts)
        numbers = range(first, min(first + min(count, max(1, READ // longest)), len(self.prompts)))
        rest, lengths = (x.to(self.model.device) for x in pad([self.prompts[p] for p in numbers]))
        hidden, cache = self.model(rest, lengths, None if self.stem is None else self.stem.expand(len(numbers)))
        level, last = cache.levels[-1], hidden[torch.arange(len(numbers), device=hidden.device), lengths - 1]
        spare = [place for place in range(len(held) + len(numbers)) if place not in held][: len(numbers)]
        self.place.update(zip(numbers, spare, strict=True))
        most = max(spare[-1] + 1, len(self.width))
        self.width = functional.pad(self.width, (0, most - len(self.width)))
        self.width[spare] = lengths.cpu()
        if not self.read_level.keys:
            self._allocate(level, last)
        for kept, new in ((self.read_level.keys, level.keys), (self.read_level.values, level.values)):
            for layer, fresh in enumerate(new):
                kept[layer] = _enlarged(kept[layer], most, longest)
                kept[layer][spare, :, : fresh.shape[2]] = fresh.to(kept[layer].dtype)
        self.last = functional.pad(self.last, (0, 0, 0, most - len(self.last)))
        self.last[spare], self.above = last, None

    def _allocate(self, level: Level, last: Tensor) -> None:
        """Empty memory for prompts and slots, in the type in which products are computed: nothing is cast twice."""
        kind = self.model.autocast

        def empty(like: Tensor, rows: int) -> Tensor:
            return like.new_empty(rows, like.shape[1], 0, like.shape[3], dtype=kind or like.dtype)

        self.read_level = Level([empty(k, 0) for k in level.keys], [empty(v, 0) for v in level.values])
        slots = len(self.row)
        self.own = Level([empty(k, slots) for k in level.keys], [empty(v, slots) for v in level.values])
        self.hidden, self.last = last.new_zeros(slots, last.shape[1]), last[:0]

    def _make_room(self, places: int) -> None:
        """Memory for so many tokens a row, a piece at a time: most rows end before the limit."""
        room = self.own.keys[0].shape[2]
        if places > room:
            room = min(max(places, room + max(PLACES, room // 2)), self.limit)
            for tensors in (self.own.keys, self.own.values):
                for layer, x in enumerate(tensors):
                    tensors[layer] = _enlarged(x, len(self.row), room)

    def _above(self) -> Level:
        """The prompts of the rows in slots, cut to what is in use, with who sits under whom."""
        if self.above is None:
            count = int(self.owner.max()) + 1  # a slot without a row goes on with the prompt that it had
            width = self.width[:count].clone()
            width[torch.isin(torch.arange(count), self.owner, invert=True)] = 1  # nobody looks at it
            longest, device = int(width.max()), self.model.device
            padded = torch.arange(longest) >= width[:, None]
            self.above = Level(
                [k[:count, :, :longest] for k in self.read_level.keys],
                [v[:count, :, :longest] for v in self.read_level.values],
                padded.to(device) if bool(padded.any()) else None,
                Seats.of(self.owner.to(device), count),
            )
        return self.above


def _rows(level: Level, rows: Tensor) -> Level:
    """Those rows of the memory of a level, which it gives up a layer at a time."""
    for tensors in (level.keys, level.values):
        for layer, x in enumerate(tensors):
            tensors[layer] = x[rows.to(x.device)]
    return level


def _enlarged(memory: Tensor, rows: int, places: int) -> Tensor:
    """`[B, KV, T, D]` with at least so many rows and places; the same where it has them."""
    more = max(rows - memory.shape[0], 0), max(places - memory.shape[2], 0)
    return functional.pad(memory, (0, 0, 0, more[1], 0, 0, 0, more[0])) if any(more) else memory
