"""Speculative decoding: a cheap draft proposes a few tokens, one pass of the model decides how many are accepted.

The samples have the model's own distribution (`ops.speculation`; Leviathan et al. 2023, arXiv:2211.17192, algorithm 1;
Chen et al. 2023, arXiv:2302.01318, algorithm 2). The draft is a smaller language model, or the model's own multi-token
heads (Stern et al. 2018, arXiv:1811.03115), which are accurate for a few tokens only. Most of their time is the
unembedding's: drafts may be among the frequent tokens alone (Zhao et al. 2025, arXiv:2502.14856). At batch size 1 the
time of a pass on an accelerator is that of reading the weights, for one token as for five, so the speedup is the tokens
per pass; on a CPU a few tokens take somewhat longer than one.

Rows are decoded one at a time; use `planning.generation.decoding` for batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.text import TokenBatch, pad
from foresight.errors import UserError
from foresight.nets.language import mtp
from foresight.nets.language.cache import Cache, Level
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.nets.language.packed import FEW, PACK, packed
from foresight.ops.speculation import accepted, distribution, residual
from foresight.ops.tokens import token_logprob
from foresight.planning.generation import decoding
from foresight.planning.generation.sampling import invert

Draw = Callable[[Tensor], int]  # a token from a distribution [V]
Unembed = Callable[[Tensor], Tensor]  # logits [..., n] of the first n tokens, from features [..., D]
Propose = Callable[[Sequence[int], Tensor], tuple[list[int], Tensor]]
"""From the tokens so far and the model's features `[D]` before the last: drafts and their distributions `[n, V]`."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Completions, and how many tokens were drafted and accepted in how many passes of the model."""

    batch: TokenBatch
    drafted: int
    accepted: int
    passes: int

    @property
    def acceptance(self) -> float:
        """The share of accepted drafts; those after a rejection count as drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass of the model: 1 without speculation."""
        return int(self.batch.length.sum()) / max(self.passes, 1)


@torch.no_grad()
def speculate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    draft: MultiTokenHeads | LanguageModel,
    group: int = 1,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    ahead: int = 4,
    draft_vocabulary: int | None = None,
) -> Speculation:
    """Sample `group` completions of each prompt as `planning.generation.decoding.generate` does, in the same
    distribution.

    A draft model proposes `ahead` tokens at a time; K heads at most K - 1. Drafts are among the first
    `draft_vocabulary` tokens (None: among all): byte-pair encodings number frequent ones first. Raises UserError as
    `generate` does, if a prompt leaves no room for drafts in the context, without a usable draft, or if the draft model
    has another vocabulary.
    """
    depth = min(ahead, len(draft) - 1) if isinstance(draft, MultiTokenHeads) else ahead
    decoding.check(model, prompts, group, max_new_tokens, temperature)
    _check(model, prompts, draft, depth, max_new_tokens)
    drafting = model if isinstance(draft, MultiTokenHeads) else draft
    unembed, first = _unembedding(drafting, draft_vocabulary)
    rows: list[list[int]] = []
    logprobs: list[list[float]] = []
    counts = torch.zeros(3, dtype=torch.int64)

    def draw(probability: Tensor) -> int:
        uniform = torch.rand(1, generator=generator)  # on a CPU `multinomial` takes ten times as long
        return int(invert(probability.cpu()[None], uniform)[0])

    kind = model.autocast if max_new_tokens * len(prompts) * group >= PACK else None
    with model.precision(), packed(kind, 1 if depth < FEW else 1 + depth, model, draft, *first):
        for prompt in [prompt for prompt in prompts for _ in range(group)]:
            reader = _Reader(model, prompt, max_new_tokens + depth)
            if isinstance(draft, MultiTokenHeads):
                propose = _by_heads(model, draft, unembed, depth, temperature, draw)
            else:
                smaller = _Reader(draft, prompt, max_new_tokens + depth)
                propose = _by_model(smaller, unembed, ahead, temperature, draw, model.vocab_size)
            row, logprob, spent = _complete(reader, propose, max_new_tokens, temperature, draw, generator)
            rows.append(row)
            logprobs.append(logprob)
            counts += torch.tensor(spent)
    completion, length = pad(rows)
    shape = (len(prompts), group, completion.shape[1])
    known = torch.zeros(completion.shape)
    for i, logprob in enumerate(logprobs):
        known[i, : len(logprob)] = torch.tensor(logprob)
    stopped = torch.tensor([row[-1] in model.stop_ids for row in rows]).view(shape[:2])
    batch = TokenBatch(*pad(prompts), completion.view(shape), length.view(shape[:2]), known.view(shape), stopped)
    return Speculation(batch, *counts.tolist())


def _complete(
    reader: _Reader,
    propose: Propose,
    limit: int,
    temperature: float,
    draw: Draw,
    generator: torch.Generator | None,
) -> tuple[list[int], list[float], tuple[int, int, int]]:
    """One completion, the log-probability of each token, and the counts of drafts, accepted drafts and passes."""
    model, stops = reader.model, set(reader.model.stop_ids)
    feature = reader.hidden
    written: list[int] = []
    logprobs: list[float] = []
    drafted = verified = passes = 0
    logits = model.logits(feature[None])
    new = [draw(distribution(logits, temperature)[0])]
    while True:
        for place, token in enumerate(new):
            logprob, _ = token_logprob(
                logits[place, None], logits.new_tensor([token], dtype=torch.int64), temperature or 1
            )
            written.append(token)
            logprobs.append(logprob.item())
            if token in stops or len(written) == limit:
                return written, logprobs, (drafted, verified, passes + 1)
        drafts, draft_probs = propose(written, feature)
        seen = reader.read([written[-1], *drafts])
        logits = model.logits(seen)
        target = distribution(logits, temperature)
        uniform = torch.rand(len(drafts), generator=generator).to(target)
        chosen = torch.tensor(drafts, device=target.device)
        kept = int(accepted(target[:-1], draft_probs, chosen, uniform))
        nothing = torch.zeros_like(target[:1])  # after the last draft nothing can be rejected
        rest = residual(target[kept], torch.cat([draft_probs.to(target), nothing])[kept])
        new = [*drafts[:kept], draw(rest)]
        reader.length -= len(drafts) - kept
        feature = seen[kept]
        drafted, verified, passes = drafted + len(drafts), verified + kept, passes + 1


class _Reader:
    """A model with its cache after a prompt and `length` accepted tokens; rejected tokens are overwritten."""

    def __init__(self, model: LanguageModel, prompt: Sequence[int], places: int) -> None:
        self.model, self.length, self.begin = model, 0, len(prompt)
        self.tokens: list[int] = []
        with model.precision():
            hidden, cache = model.read([prompt])
        self.hidden = hidden[0]
        like = cache.levels[-1]

        def room(x: Tensor) -> Tensor:
            """The prompt, and room for more in the dtype of the products."""
            return functional.pad(x.to(model.autocast or x.dtype), (0, 0, 0, places))

        self.level = Level([room(k) for k in like.keys], [room(v) for v in like.values])
        self.cache = Cache([], torch.zeros_like(cache.positions))

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read n more tokens. Returns the features `[n, D]` after each."""
        row = torch.tensor([list(tokens)], device=self.model.device)
        hidden = self.model.extend(row, self.cache, self.level, self.begin + self.length)[0]
        self.tokens[self.length :] = tokens
        self.length += len(tokens)
        return hidden


def _unembedding(model: LanguageModel, count: int | None) -> tuple[Unembed, list[nn.Linear]]:
    """The logits of a model's first `count` tokens, and the layer that computes them, which has the model's weights."""
    if count is None:
        return model.logits, []
    if count < 1:
        raise UserError(f"draft_vocabulary is {count}: it must be at least 1.")
    whole = model.module.get_output_embeddings()
    if not isinstance(whole, nn.Linear):
        raise UserError(
            f"{type(model.module).__name__} has no linear unembedding to draft with: leave out draft_vocabulary."
        )
    first = nn.Linear(whole.in_features, min(count, whole.out_features), whole.bias is not None, device="meta")
    for name, weight in whole.named_parameters():
        setattr(first, name, nn.Parameter(weight.detach()[:count], requires_grad=False))
    return lambda features: model.scaled(first(features)), [first]


def _by_heads(
    model: LanguageModel, heads: MultiTokenHeads, unembed: Unembed, ahead: int, temperature: float, draw: Draw
) -> Propose:
    """Head k continues from the features of head k - 1 and the token drafted before."""

    def propose(written: Sequence[int], feature: Tensor) -> tuple[list[int], Tensor]:
        token, features, drafts, draft_probs = written[-1], feature[None], list[int](), list[Tensor]()
        for head in range(2, ahead + 2):
            features = heads.extend(head, features, mtp.embed(model, torch.tensor([token])))
            draft_probs.append(_whole(distribution(unembed(features)[0], temperature), model.vocab_size))
            token = draw(draft_probs[-1])
            drafts.append(token)
        return drafts, torch.stack(draft_probs)

    return propose


def _by_model(
    reader: _Reader, unembed: Unembed, ahead: int, temperature: float, draw: Draw, vocab_size: int
) -> Propose:
    """The smaller model continues the completion, of which it may have read a part.

    Its probabilities cover the `vocab_size` rows of the larger model's unembedding, as tables of one vocabulary may be
    padded differently.
    """

    def propose(written: Sequence[int], feature: Tensor) -> tuple[list[int], Tensor]:
        model, drafts, draft_probs = reader.model, list[int](), list[Tensor]()
        valid = 0  # tokens read that agree with the completion
        while valid < min(reader.length, len(written) - 1) and reader.tokens[valid] == written[valid]:
            valid += 1
        reader.length = valid
        with model.precision():
            hidden = reader.read(written[valid:])[-1]
            while True:
                probability = distribution(unembed(hidden[None])[0, :vocab_size], temperature)
                draft_probs.append(_whole(probability, vocab_size))
                drafts.append(draw(draft_probs[-1]))
                if len(drafts) == ahead:
                    return drafts, torch.stack(draft_probs)
                hidden = reader.read(drafts[-1:])[-1]

    return propose


def _whole(probability: Tensor, vocab_size: int) -> Tensor:
    """The distribution `[V]` of the first tokens over all."""
    return functional.pad(probability, (0, vocab_size - len(probability)))


def _check(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    draft: MultiTokenHeads | LanguageModel | None,
    depth: int,
    limit: int,
) -> None:
    for one in (model, draft):
        if isinstance(one, LanguageModel) and not one.capabilities.shared:
            raise UserError(
                f"{type(one.module).__name__} is computed row by row, which speculative decoding does not support: "
                "use generate, or choose another model (Llama, Qwen, SmolLM)."
            )
    if draft is None:
        raise UserError("There is nothing to draft with: this model was saved without multi-token heads.")
    if depth < 1:
        raise UserError(
            "There is nothing to draft with: train with predict_tokens of at least 2, or set ahead to at least 1."
        )
    smaller = None if isinstance(draft, MultiTokenHeads) else draft
    if smaller is not None and smaller.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UserError("The draft model has another vocabulary than the model: choose one with the same tokenizer.")
    longest, context = max(map(len, prompts)), min(m.context for m in (model, smaller) if m is not None)
    if longest + limit + depth > context:
        raise UserError(
            f"A prompt of {longest} tokens, {limit} new ones and {depth} drafts do not fit into a context of {context}"
            ": shorten the prompt or lower max_new_tokens."
        )
