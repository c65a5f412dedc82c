"""Decoding: prompts in, sampled token rows out, with the log-probabilities under which they were sampled.

A prefix that all prompts share is computed once per batch, and a prompt once per group. With continuous batching, short
rows never wait for long ones. Each token is decided by one uniform random number, so the result depends on the
generator only, not on the batching. The model samples with its own weights, which are not copied, so each call uses the
weights of the last update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.text import TokenBatch, pad
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.packed import PACK, packed
from foresight.ops.tokens import token_logprob
from foresight.planning.generation import constraints
from foresight.planning.generation.continuous_batching import ContinuousBatchScheduler
from foresight.planning.generation.prefix_cache import PrefixCache
from foresight.planning.generation.sampling import choose
from foresight.planning.generation.static_batching import StaticBatchScheduler

SLOTS = 64  # rows decoded at once on a CPU: with more, a token takes as long


class Completer(Protocol):
    """Completes prompts of token ids: a model in this process (`generate`), or a server
    (`planning.generation.server`).

    Returns a TokenBatch `[P, G]` of the sampled ids, which are never tokenized again.
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
    kept: PrefixCache | None = None,
) -> TokenBatch:
    """Sample `group` completions of each prompt, up to a stop token, a text of `stop`, or `max_new_tokens`.

    - `temperature`, `top_k`, `top_p`: see `choose`;
    - `stop`: texts that end a row, also across token boundaries; the row keeps the token that completes one;
    - `choices`: the allowed answers, one list for all prompts or one for each (see `planning.generation.constraints`);
    - `slots`: rows decoded at once; by default 64 on a CPU, and 512 elsewhere;
    - `kept`: a cache of prefixes: what it holds of a prompt is not read again, and what was read and sampled is added.

    Returns a TokenBatch of `[P, G]` rows: `logprob` is of the distribution sampled from (truncated and constrained),
    `model_logprob` of the model itself. Raises UserError if a prompt leaves no room in the context, if a choice does
    not fit into `max_new_tokens`, or if `slots` is not positive.
    """
    check(model, prompts, group, max_new_tokens, temperature, top_k, top_p, stop)
    if slots is not None and slots < 1:
        raise UserError(f"slots is {slots}: it must be at least 1. Leave it out for the default.")
    tries = None if choices is None else constraints.tries(model, choices, len(prompts))
    if tries is not None and (longest := max(map(constraints.depth, tries))) > max_new_tokens:
        raise UserError(f"The longest choice has {longest} tokens with its end: raise max_new_tokens to {longest}.")
    count, device = len(prompts) * group, model.device
    uniform = torch.rand(len(prompts), group, max_new_tokens, generator=generator).view(count, -1).numpy()
    # Arrays: single elements of tensors are read and written ten times as slowly.
    completion, length = np.zeros((count, max_new_tokens), np.int64), np.zeros(count, np.int64)
    logprob, model_logprob = (np.zeros((count, max_new_tokens), np.float32) for _ in range(2))
    stopped, stops = np.zeros(count, bool), set(model.stop_ids)
    nodes = [] if tries is None else [trie for trie in tries for _ in range(group)]
    same = tries is None and not top_k and top_p >= 1 and temperature in (0.0, 1.0)  # as the model's own distribution

    slots = min(slots or (SLOTS if device.type == "cpu" else 8 * SLOTS), count)
    steps = max_new_tokens * -(-count // slots)  # of decoding, at most: slots are filled again and again
    kind = model.autocast if steps >= PACK and model.capabilities.shared else None
    with model.precision(), packed(kind, slots, model.module):
        scheduler: ContinuousBatchScheduler | StaticBatchScheduler = (
            ContinuousBatchScheduler(model, prompts, group, slots, max_new_tokens, kept)
            if model.capabilities.shared
            else StaticBatchScheduler(model, prompts, group, slots)
        )
        while scheduler.fill():
            live = scheduler.live()
            rows = scheduler.row[live].numpy()
            place = length[rows]
            logits = model.logits(scheduler.hidden[live.to(device)])
            allowed = logits
            if tries is not None:
                allowed = constraints.mask_logits(logits, [nodes[row] for row in rows.tolist()])
            drawn = torch.from_numpy(uniform[rows, place]).to(device)
            token, logp = choose(allowed, drawn, temperature, top_k, top_p)
            own = logp if same else token_logprob(logits, token)[0]
            token = token.cpu()
            completion[rows, place] = token.numpy()
            logprob[rows, place], model_logprob[rows, place] = (x.float().cpu().numpy() for x in (logp, own))
            length[rows] += 1
            sampled = token.tolist()
            for row, one in zip(rows.tolist(), sampled, strict=True) if nodes else ():
                nodes[row] = nodes[row][one]
            ended = np.array([one in stops for one in sampled])
            if stop:
                ended |= [constraints.stops_at(model, completion[row, : length[row]].tolist(), stop) for row in rows]
            stopped[rows] = ended
            over = ended | (length[rows] == max_new_tokens)
            if over.any():
                if kept is not None and isinstance(scheduler, ContinuousBatchScheduler):
                    for slot, row in zip(live[over].tolist(), rows[over].tolist(), strict=True):
                        scheduler.keep(slot, completion[row, : length[row]].tolist())
                scheduler.free(live[over])
                token = token[~over]
            scheduler.step(token)
    width = int(length.max())
    prompt, prompt_length = pad(prompts)

    def shaped(x: NDArray[Any], *shape: int) -> Tensor:
        return torch.from_numpy(x).view(len(prompts), group, *shape)

    return TokenBatch(
        prompt,
        prompt_length,
        shaped(completion[:, :width].copy(), width),
        shaped(length),
        shaped(logprob[:, :width].copy(), width),
        shaped(stopped),
        shaped(model_logprob[:, :width].copy(), width),
    )


def check(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    group: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
) -> None:
    """Raise UserError for settings that `generate` cannot sample with, and for prompts that do not fit the context."""
    if min(group, max_new_tokens) < 1 or not temperature >= 0:
        raise UserError(
            f"group and max_new_tokens must be at least 1 and temperature at least 0, but they are {group}, "
            f"{max_new_tokens} and {temperature}."
        )
    if not prompts or not all(prompts):
        raise UserError("There is nothing to complete: give at least one prompt, with at least one token each.")
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"stop must be a list of non-empty texts, not {stop!r}: write stop=['...'].")
    if top_k < 0 or not 0 < top_p <= 1:
        raise UserError(f"top_k must be 0 (all) or more and top_p in (0, 1], but they are {top_k} and {top_p}.")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > model.context:
        raise UserError(
            f"A prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the model's context of "
            f"{model.context}: shorten the prompt or lower max_new_tokens."
        )
