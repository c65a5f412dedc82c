"""Decoding: prompts in, sampled token rows out, with the log-probabilities under which they were sampled.

Prompts are read once a batch and once a group; rows that ended stop costing; one uniform number decides
each token, so the result depends on the generator alone and not on how rows were batched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresight.data.text import TokenBatch, pad
from foresight.errors import UserError
from foresight.nets.language import Cache, LanguageModel, Level


def choose(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Pick a token a row by inverting the cumulative distribution. Logits `[B, V]`, uniform `[B]` in [0, 1).

    Temperature 0 is greedy. Returns tokens `[B]` and their log-probabilities `[B]` under the distribution
    sampled from (under the model's own, where greedy).
    """
    logits = logits.float()
    logp = (logits if temperature in (0.0, 1.0) else logits / temperature).log_softmax(-1)
    if temperature == 0.0:
        token = logp.argmax(-1)
    else:
        total = logp.exp().cumsum(-1)
        # The last sum is 1 but for rounding: scale the draw by it, so that no draw falls past the end.
        token = torch.searchsorted(total, uniform[:, None].to(total) * total[:, -1:], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    group: int = 1,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> TokenBatch:
    """Sample `group` completions of each prompt, up to a stop token or `max_new_tokens`.

    Returns a TokenBatch of `[P, G]` rows. Raises UserError if a prompt leaves no room in the context.
    """
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > model.context:
        raise UserError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the model's context of "
            f"{model.context}: shorten the prompt or lower max_new_tokens."
        )
    device, count = model.device, len(prompts)
    uniform = torch.rand(count, group, max_new_tokens, generator=generator).view(count * group, -1)
    completion = torch.zeros(count * group, max_new_tokens, dtype=torch.int64)
    logprob = torch.zeros(count * group, max_new_tokens)
    length = torch.zeros(count * group, dtype=torch.int64)
    stopped = torch.zeros(count * group, dtype=torch.bool)
    stops = torch.tensor(model.stop_ids)

    with model.precision():
        last, cache = model.read(prompts)
        live = _Live(cache, last.repeat_interleave(group, 0), count, group, max_new_tokens)
        for place in range(max_new_tokens):
            token, logp = choose(model.logits(live.hidden), uniform[live.rows, place].to(device), temperature)
            token, logp = token.cpu(), logp.cpu()
            completion[live.rows, place], logprob[live.rows, place] = token, logp
            length[live.rows] += 1
            ended = torch.isin(token, stops)
            stopped[live.rows] |= ended
            if place == max_new_tokens - 1:
                break
            live.drop(stopped)
            if not len(live.rows):
                break
            live.hidden = model.step(completion[live.rows, place].to(device), live.cache, live.level, place)
    width = int(length.max())
    done = length_after_stop(completion, stops, length)
    prompt, prompt_length = pad(prompts)
    mask = torch.arange(width) < done[:, None]
    shape = (count, group, width)
    return TokenBatch(
        prompt,
        prompt_length,
        (completion[:, :width] * mask).view(shape),
        done.view(count, group),
        (logprob[:, :width] * mask).view(shape),
        stopped.view(count, group),
    )


def length_after_stop(completion: Tensor, stops: Tensor, length: Tensor) -> Tensor:
    """Lengths `[B]` of rows `[B, T]` up to and with their first stop token; `length` where there is none."""
    hit = torch.isin(completion, stops) & (torch.arange(completion.shape[1]) < length[:, None])
    first = hit.int().argmax(-1) + 1
    return torch.where(hit.any(-1), first, length)


class _Live:
    """The rows still being decoded, kept as a rectangle [prompts, rows a prompt] so that groups share a prompt.

    A row that ended is carried along until the rectangle can shrink: while some sibling is alive.
    """

    def __init__(self, cache: Cache, hidden: Tensor, prompts: int, group: int, places: int) -> None:
        self.cache, self.hidden = cache.expand(group), hidden
        self.rows = torch.arange(prompts * group)  # where each live row is in the whole batch
        self.prompts, self.group = prompts, group
        template = cache.levels[-1]

        def buffer(like: Tensor) -> Tensor:
            return like.new_zeros(len(self.rows), like.shape[1], places, like.shape[3])

        self.level = Level([buffer(k) for k in template.keys], [buffer(v) for v in template.values])

    def drop(self, stopped: Tensor) -> None:
        """Leave out prompts whose rows all ended, and as many ended rows of each prompt as all prompts can spare."""
        alive = ~stopped[self.rows].view(self.prompts, self.group)
        keep_prompts = alive.any(1).nonzero()[:, 0]
        group = int(alive.sum(1).max()) if len(keep_prompts) else 0
        if len(keep_prompts) * group > 0.75 * len(self.rows):
            return  # not worth the copy yet
        if not len(keep_prompts):
            self.rows = self.rows[:0]
            return
        # Living rows first in each prompt, then cut every prompt to the same number of rows.
        order = alive[keep_prompts].int().argsort(dim=1, descending=True, stable=True)[:, :group]
        index = (keep_prompts[:, None] * self.group + order).reshape(-1)
        self.rows = self.rows[index]
        device = self.hidden.device
        index, parents = index.to(device), keep_prompts.to(device)
        self.level = Level([k[index] for k in self.level.keys], [v[index] for v in self.level.values])
        levels = self.cache.levels
        whole = self.prompts
        chosen = [lv if lv.keys[0].shape[0] != whole or whole == 1 else _pick(lv, parents) for lv in levels]
        self.cache = Cache(chosen, self.cache.positions[index])
        self.prompts, self.group = len(keep_prompts), group


def _pick(level: Level, rows: Tensor) -> Level:
    blocked = None if level.blocked is None else level.blocked[rows]
    return Level([k[rows] for k in level.keys], [v[rows] for v in level.values], blocked)
