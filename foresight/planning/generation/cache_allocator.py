"""The memory of continuous batching: KV buffers for the shared prefix, the prompts in use and a slot for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foresight.data.text import common_prefix, pad
from foresight.nets.language.cache import Cache, Level, RowMap
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import prefix_cache
from foresight.planning.generation.prefix_cache import PrefixCache

PLACES = 32  # tokens by which the slots grow, or by half
READ = 4096  # prompt tokens read at once


class CacheAllocator:
    """A static KV cache of three levels: the prefix that all prompts share, the prompts, and the rows in slots.

    A prompt is stored once for all its rows and freed when the last of them ends. With `merged` (one row a prompt, or
    one slot) the prompt is copied into the slot of its row, since two levels cost less than three. A single slot has no
    prefix apart, so that with `merged` it is one buffer, as compiled loops need it (`nets.language.packed`). What
    `kept` holds of a prompt is not read again, and what is read is added to it.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        slots: int,
        max_new_tokens: int,
        merged: bool,
        kept: PrefixCache | None = None,
    ) -> None:
        self.model, self.merged, self.kept = model, merged, kept
        shared = common_prefix(prompts) if len(prompts) > 1 < slots else 0
        self.shared_ids = list(prompts[0][:shared])
        self.prefix = self._shared(self.shared_ids) if shared else None
        self.shared, self.prompts = shared, [list(prompt[shared:]) for prompt in prompts]
        self.limit = max_new_tokens + (max(map(len, self.prompts)) if merged else 0)  # tokens of a slot
        self.place: dict[int, int] = {}  # prompt -> its row in `prompt_level`
        self.width = torch.zeros(0, dtype=torch.int64)  # number of tokens of the prompt in each row
        self.owner = torch.zeros(slots, dtype=torch.int64)  # the prompt's row for each slot
        self.filled = torch.zeros(slots, dtype=torch.int64)  # tokens in each slot, with its prompt's where merged
        self.hidden = self.last = torch.zeros(0)  # hidden state of each slot, and at the end of each prompt
        self.prompt_level, self.slot_level = Level([], []), Level([], [])
        self._above: Level | None = None  # cached view of the prompts in use

    def has(self, prompt: int) -> bool:
        """Whether the prompt is in memory."""
        return prompt in self.place

    def assign(self, slot: int, prompt: int) -> None:
        """Start a row of a prompt that is in memory."""
        place = self.place[prompt]
        self.owner[slot], self.filled[slot] = place, 0
        self.hidden[slot], self._above = self.last[place], None
        if self.merged:
            self.filled[slot] = width = int(self.width[place])
            self._grow(width)
            levels = self.slot_level, self.prompt_level
            for own, read in (tuple(level.keys for level in levels), tuple(level.values for level in levels)):
                for buffer, tokens in zip(own, read, strict=True):
                    buffer[slot, :, :width] = tokens[place, :, :width]

    def read(self, first: int, count: int, live: Tensor) -> None:
        """Prefill up to `count` prompts, starting with `first`, in the rows of prompts that no `live` slot uses."""
        held = {self.owner[slot].item() for slot in live.tolist()}
        self.place = {p: place for p, place in self.place.items() if place in held}
        longest = max(len(prompt) for prompt in self.prompts)
        chosen = range(first, min(first + min(count, max(1, READ // longest)), len(self.prompts)))
        level, last, lengths = self._read([self.prompts[p] for p in chosen])
        places = [place for place in range(len(held) + len(chosen)) if place not in held][: len(chosen)]
        self.place.update(zip(chosen, places, strict=True))
        rows = max(places[-1] + 1, len(self.width))
        self.width = functional.pad(self.width, (0, rows - len(self.width)))
        self.width[places] = lengths.cpu()
        if not self.prompt_level.keys:
            self._allocate(level, last)
        for kept, new in ((self.prompt_level.keys, level.keys), (self.prompt_level.values, level.values)):
            for layer, tokens in enumerate(new):
                kept[layer] = _enlarged(kept[layer], rows, longest)
                kept[layer][places, :, : tokens.shape[2]] = tokens.to(kept[layer].dtype)
        self.last = functional.pad(self.last, (0, 0, 0, rows - len(self.last)))
        self.last[places], self._above = last, None

    def _shared(self, ids: list[int]) -> Cache:
        """The cache of the prefix that all prompts share."""
        known, device, above = 0, self.model.device, None
        if self.kept is not None and (known := self.kept.known(ids)):
            row = self.kept.read(ids[:known])
            above = Cache([prefix_cache.level_of([row], row)], torch.tensor([known], device=device))
        if above is not None and known == len(ids):
            return above
        rest = torch.tensor([ids[known:]], device=device)
        cache: Cache = self.model(rest, torch.tensor([len(ids) - known], device=device), above)[1]
        if self.kept is not None:
            self.kept.add(ids, known, cache.levels[-1], 0)
        return cache

    def _read(self, prompts: list[list[int]]) -> tuple[Level, Tensor, Tensor]:
        """Prefill prompts after the shared prefix: their level, last hidden states and lengths."""
        device, rows = self.model.device, torch.arange(len(prompts), device=self.model.device)
        whole = [self.shared_ids + prompt for prompt in prompts]
        # At least the last token of a prompt is read: its hidden state is wanted.
        known = [0 if self.kept is None else max(0, self.kept.known(ids[:-1]) - self.shared) for ids in whole]
        above = None if self.prefix is None else self.prefix.expand(len(prompts))
        kept: Level | None = None
        if self.kept is not None and any(known):
            parts = [
                self.kept.read(ids[: self.shared + n], self.shared) if n else None
                for ids, n in zip(whole, known, strict=True)
            ]
            like = next(part for part in parts if part is not None)
            kept = prefix_cache.level_of(parts, like)
            start = torch.tensor(known, device=device) + self.shared
            above = Cache([*([] if above is None else above.levels), kept], start)
        pieces = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]
        rest, lengths = (x.to(device) for x in pad(pieces))
        hidden, cache = self.model(rest, lengths, above)
        level, last = cache.levels[-1], hidden[rows, lengths - 1]
        if self.kept is not None:
            for row, (ids, n) in enumerate(zip(whole, known, strict=True)):
                self.kept.add(ids, self.shared + n, level, row)
        if kept is not None:
            level, lengths = _joined(kept, level, torch.tensor(known, device=device), lengths)
        return level, last, lengths

    def keep_row(self, slot: int, prompt: int, completion: Sequence[int]) -> None:
        """Add a row's prompt and completion to `kept`, less the last token, which was not read."""
        if self.kept is not None:
            ids = self.shared_ids + self.prompts[prompt]
            first = len(self.prompts[prompt]) if self.merged else 0
            self.kept.add([*ids, *completion[:-1]], len(ids), self.slot_level, slot, first)

    def step(self, live: Tensor, tokens: Tensor) -> None:
        """Run the model on one token for each of the `live` slots; sets `hidden`."""
        device = self.model.device
        entered = torch.zeros(len(self.filled), dtype=torch.int64)
        entered[live] = tokens
        self._grow(int(self.filled.max()) + 1)
        prefix = [] if self.prefix is None else self.prefix.levels
        levels = prefix if self.merged else [*prefix, self._prompts()]
        start = self.shared if self.merged else self.shared + self.width[self.owner]
        cache = Cache(levels, torch.as_tensor(start).expand(len(self.filled)).to(device))
        self.hidden = self.model.step(entered.to(device), cache, self.slot_level, self.filled.to(device))
        self.filled[live] += 1

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Run the model on several tokens of one slot at once; sets its `hidden`."""
        filled, owner = int(self.filled[slot]), int(self.owner[slot])
        self._grow(filled + len(tokens))
        levels, start = [] if self.prefix is None else list(self.prefix.levels), self.shared
        if not self.merged:
            width = int(self.width[owner])
            levels.append(_row(self.prompt_level, owner, width))
            start += width
        own = _row(self.slot_level, slot)  # views: what is written in them is written in the slot
        device = self.model.device
        cache = Cache(levels, torch.tensor([start], device=device))
        self.hidden[slot] = self.model.extend(torch.tensor([list(tokens)], device=device), cache, own, filled)[0, -1]
        self.filled[slot] += len(tokens)

    def free(self, slots: Tensor) -> None:
        """Empty the slots of rows that ended."""
        self.filled[slots] = 0

    def keep(self, live: Tensor) -> None:
        """Keep only the `live` slots and their prompts."""
        places, owner = self.owner[live].unique(return_inverse=True)
        self.slot_level, self.prompt_level = _rows(self.slot_level, live), _rows(self.prompt_level, places)
        self.hidden = self.hidden[live.to(self.hidden.device)]
        self.filled, self.owner, self.width = self.filled[live], owner, self.width[places]
        self._above = None

    def _allocate(self, level: Level, last: Tensor) -> None:
        """Allocate empty buffers for prompts and slots, in the dtype of the products, so nothing is cast twice."""
        dtype = self.model.autocast

        def empty(like: Tensor, rows: int) -> Tensor:
            return like.new_empty(rows, like.shape[1], 0, like.shape[3], dtype=dtype or like.dtype)

        self.prompt_level = Level([empty(k, 0) for k in level.keys], [empty(v, 0) for v in level.values])
        slots = len(self.filled)
        self.slot_level = Level([empty(k, slots) for k in level.keys], [empty(v, slots) for v in level.values])
        self.hidden, self.last = last.new_zeros(slots, last.shape[1]), last[:0]

    def _grow(self, places: int) -> None:
        """Make room for `places` tokens per slot. Memory grows in steps, as most rows end before the limit."""
        room = self.slot_level.keys[0].shape[2]
        if places > room:
            room = min(max(places, room + max(PLACES, room // 2)), self.limit)
            for tensors in (self.slot_level.keys, self.slot_level.values):
                for layer, x in enumerate(tensors):
                    tensors[layer] = _enlarged(x, len(self.filled), room)

    def _prompts(self) -> Level:
        """The prompts of the slots as a level, cut to the part in use, with the map from slots to prompts."""
        if self._above is None:
            count = int(self.owner.max()) + 1  # a free slot keeps its last prompt
            width = self.width[:count].clone()
            width[torch.isin(torch.arange(count), self.owner, invert=True)] = 1  # unused, so its content is irrelevant
            longest, device = int(width.max()), self.model.device
            padded = torch.arange(longest) >= width[:, None]
            self._above = Level(
                [k[:count, :, :longest] for k in self.prompt_level.keys],
                [v[:count, :, :longest] for v in self.prompt_level.values],
                padded.to(device) if bool(padded.any()) else None,
                RowMap.of(self.owner.to(device), count),
            )
        return self._above


def _joined(first: Level, second: Level, lengths: Tensor, more: Tensor) -> tuple[Level, Tensor]:
    """Rows with `lengths` `[B]` tokens of one level, then `more` `[B]` of another; and how many both are."""
    total, width = lengths + more, first.keys[0].shape[2]
    place = torch.arange(int(total.max()), device=total.device).expand(len(total), -1)
    at = torch.where(place < lengths[:, None], place, place - lengths[:, None] + width)
    at = at.clamp(max=width + second.keys[0].shape[2] - 1)  # of the padding, which is not used
    rows = torch.arange(len(total), device=total.device)[:, None]

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a.to(b.dtype), b], 2)[rows, :, at].transpose(1, 2)

    keys = [join(a, b) for a, b in zip(first.keys, second.keys, strict=True)]
    return Level(keys, [join(a, b) for a, b in zip(first.values, second.values, strict=True)]), total


def _rows(level: Level, rows: Tensor) -> Level:
    """The given rows of a level, replaced one layer at a time to limit the peak memory."""
    for tensors in (level.keys, level.values):
        for layer, x in enumerate(tensors):
            tensors[layer] = x[rows.to(x.device)]
    return level


def _row(level: Level, row: int, width: int | None = None) -> Level:
    """One row of a level, up to `width` tokens, without a copy."""
    keys = [x[row : row + 1, :, :width] for x in level.keys]
    return Level(keys, [x[row : row + 1, :, :width] for x in level.values])


def _enlarged(buffer: Tensor, rows: int, places: int) -> Tensor:
    """`[B, KV, T, D]` padded to at least so many rows and places; unchanged if it has them."""
    more = max(rows - buffer.shape[0], 0), max(places - buffer.shape[2], 0)
    return functional.pad(buffer, (0, 0, 0, more[1], 0, 0, 0, more[0])) if any(more) else buffer
