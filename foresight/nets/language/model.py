"""A transformers causal language model as a policy, computing what rows share only once.

Prompts of one group are equal, and prompts of one batch often begin alike (a system message), so the
tokens of a batch form a tree. Known texts are run as one `TokenTree`, so a training pass costs the *distinct*
tokens and is still exact. For sampling, `LanguageModel.forward` runs one level of the tree (a stem, prompts,
completions) over the levels above it, which it takes and returns as an explicit `Cache`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data.text import TokenBatch, common_prefix, length_mask, pad
from foresight.errors import UserError
from foresight.nets.language import architecture
from foresight.nets.language.tokentree import TokenTree
from foresight.ops.tokens import token_logprob

Message = dict[str, Any]  # role, content and, of the assistant, perhaps tool_calls
ALIKE = 0.9  # of the model's rows that its tokenizer must have: tables are padded to round numbers, but by no more
FEW = 16  # queries of one row and head, as in decoding: with fewer, keys are not turned round for the product
ATTENTION = "foresight_tree"  # the name under which transformers finds `_tree_attention`
WAY = "_foresight_way"  # where a module carries how it is computed


@dataclasses.dataclass(frozen=True)
class Seats:
    """Which rows of the next level down belong to which row of this one, where they are not equally many.

    `below` `[b, F]` are the rows under each row, filled up with any others; `place` `[B]` is where each row stands
    in `below`, laid flat.
    """

    below: Tensor
    place: Tensor

    @staticmethod
    def of(owner: Tensor, rows: int) -> Seats | None:
        """The seats of rows whose row above is `owner` `[B]`, one of `rows`; None where each has equally many in order.

        None is the case of whole groups, in which nothing needs to be moved.
        """
        even = torch.arange(rows, device=owner.device).repeat_interleave(max(1, len(owner) // rows))
        if torch.equal(owner, even):
            return None
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=rows)
        rank = torch.empty_like(owner)
        rank[order] = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        fan = int(counts.max())
        place = owner * fan + rank
        return Seats(
            owner.new_zeros(rows * fan)
            .scatter(0, place, torch.arange(len(owner), device=owner.device))
            .view(rows, fan),
            place,
        )


@dataclasses.dataclass
class Level:
    """Keys and values of one level of the token tree: `[B, KV heads, T, D]` a layer; `blocked` `[B, T]` or None.

    Each row of it owns equally many of the next level, in order, unless `seats` says otherwise.
    """

    keys: list[Tensor]
    values: list[Tensor]
    blocked: Tensor | None = None  # true on padding
    seats: Seats | None = None


@dataclasses.dataclass
class Cache:
    """What later tokens attend to: levels of growing batch, each row of one level owning rows of the next.

    `positions` `[B]` is the position of the next token of each row of the last level.
    """

    levels: list[Level]
    positions: Tensor

    def expand(self, group: int) -> Cache:
        """The same cache for a next level with `group` rows under each row: nothing is copied."""
        return Cache(self.levels, self.positions.repeat_interleave(group))


def _scores(query: Tensor, keys: Tensor, blocked: Tensor | None, seats: Seats | None = None) -> Tensor:
    """Scores `[B, KV, R, t]` of queries `[B, KV, R, D]` against keys `[b, KV, t, D]` of the rows that own them."""
    seated = _seated(query, keys.shape[0], seats)
    if seated.shape[2] < FEW:  # the product with transposed keys would take twice as long
        scores = (keys @ seated.transpose(-1, -2)).transpose(-1, -2)
    else:
        scores = seated @ keys.transpose(-1, -2)
    if blocked is not None:
        scores.masked_fill_(blocked[:, None, None, :], -torch.inf)
    return _unseated(scores, query.shape[2], seats)


def _mix(weights: Tensor, values: Tensor, seats: Seats | None = None) -> Tensor:
    """The weighted values `[B, KV, R, D]` of weights `[B, KV, R, t]` over values `[b, KV, t, D]`."""
    return _unseated(_seated(weights, values.shape[0], seats) @ values, weights.shape[2], seats)


def _seated(rows: Tensor, parents: int, seats: Seats | None) -> Tensor:
    """`[B, KV, R, x]` as `[b, KV, F·R, x]`: all rows of a parent are one product with what it holds, once in memory."""
    count, heads, width, size = rows.shape
    grouped = rows.view(parents, count // parents, heads, width, size) if seats is None else rows[seats.below]
    return grouped.transpose(1, 2).reshape(parents, heads, -1, size)


def _unseated(grouped: Tensor, width: int, seats: Seats | None) -> Tensor:
    """The inverse of `_seated`."""
    parents, heads, _, size = grouped.shape
    rows = grouped.view(parents, heads, -1, width, size).transpose(1, 2).reshape(-1, heads, width, size)
    return rows if seats is None else rows[seats.place]


def _tree_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, D]
    key: Tensor,  # [B, KV, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one level of the tree over itself (causally) and over all levels above it.

    Raises UserError where a model asks for more than that: its numbers would be other ones.
    """
    for name, what in (("s_aux", "sinks"), ("softcap", "a soft cap")):
        if kwargs.get(name) is not None:
            raise UserError(f"This model's attention has {what}, which is not supported: choose one without {what}.")
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    if isinstance(tree, TokenTree):
        return tree.attend(query, key, value, scale), None
    query = (query * scale).reshape(rows, kv_heads, heads // kv_heads * width, size)
    above, own, layer = tree.levels, tree.own(module.layer_idx, key, value), module.layer_idx
    scores = [_scores(query, level.keys[layer], level.blocked, level.seats) for level in above]
    mine = _scores(query, own[0], tree.blocked)
    if width > 1:
        future = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
        mine = mine.view(rows, kv_heads, -1, width, width).masked_fill(future, -torch.inf).view_as(mine)
    weights = torch.cat([*scores, mine], -1).softmax(-1)
    parts = weights.split([s.shape[-1] for s in scores] + [mine.shape[-1]], -1)
    mixed = parts[-1] @ own[1]
    for part, level in zip(parts[:-1], above, strict=True):
        mixed = mixed + _mix(part, level.values[layer], level.seats)
    return mixed.view(rows, heads, width, -1).transpose(1, 2), None


class _Fresh:
    """The tree as seen by a level whose tokens are all known: its keys are kept for the level below."""

    blocked = None

    def __init__(self, levels: list[Level], layers: int) -> None:
        self.levels = levels
        self.keys: list[Any] = [None] * layers
        self.values: list[Any] = [None] * layers

    def own(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer], self.values[layer] = key, value
        return key, value


class _Growing:
    """The tree as seen while decoding: each row's own tokens fill a buffer, one place a step, wherever it stands."""

    def __init__(self, levels: list[Level], level: Level, places: Tensor) -> None:
        self.levels, self.level = levels, level
        self.stop = int(places.max()) + 1
        ahead = torch.arange(self.stop, device=places.device) > places[:, None]
        abreast = not bool(ahead.any())  # all rows stand at one place: a slice, which is cheaper than an index
        self.blocked = None if abreast else ahead
        self.at: Any = (
            (slice(None), slice(None), self.stop - 1)
            if abreast
            else (torch.arange(len(places), device=places.device), slice(None), places)
        )

    def own(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.level.keys[layer], self.level.values[layer]
        keys[self.at], values[self.at] = key[:, :, 0].to(keys.dtype), value[:, :, 0].to(values.dtype)
        return keys[:, :, : self.stop], values[:, :, : self.stop]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # the tree knows who sees whom


def templated(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, **how: Any) -> Any:
    """What the tokenizer's chat template makes of a conversation, and of the tools that there are.

    Raises UserError if the template refuses the conversation, or writes the same with and without the tools.
    """
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(list(messages), tools=list(tools) if tools else None, **how)
        if tools and found == tokenizer.apply_chat_template(list(messages), **how):
            raise UserError(
                "The chat template of the model does not write tools, so it would not know of them: choose a model "
                "whose template does, or leave the column 'tools' out."
            )
        return found
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"The chat template of the model cannot write a conversation of {roles} ({error}): give messages of the "
            "roles that it knows, or the tokenizer another template."
        ) from error


class LanguageModel(nn.Module):
    """A causal language model and its tokenizer: tokens in, next-token distributions out.

    `autocast` is the dtype of matrix products (None: that of the weights). Dropout is never active. `completer`, if
    set, samples in its place: a server that was given its weights (`planning.generation.server`). `way` is how it is
    computed: where rows share nothing, `forward`, `read`, `step` and `extend` are of no use, but `rows` and `go_on`
    are.
    """

    completer: Any = None

    def __init__(self, module: Any, tokenizer: Any, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        _register()
        _check_tokenizer(module, tokenizer)
        config = module.config.get_text_config()
        self.module = module.eval()
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.layers: int = getattr(config, "num_hidden_layers", 0)
        self._finish = architecture.finish(config)
        self.context, _ = architecture.context(config, shared=True)
        known = vars(module).get(WAY)
        self.way: architecture.Way = known or architecture.find(self, ATTENTION)
        vars(module)[WAY] = self.way  # a model that has begun to learn, or is in parts, is not tried again
        self.context, why = architecture.context(config, self.way.shared)
        if known is None:
            _tell(module, self.way, self.context, why)
        eos = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
        self.stop_ids: list[int] = sorted(i for i in ids if i is not None)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def precision(self) -> torch.autocast:
        """The context in which this model computes."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def encode(self, prompt: str | Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a plain prompt or a conversation, with the model's chat template if it has one.

        `tools` are JSON schemas of the functions that the model may call. Raises UserError where it cannot be told.
        """
        if self.tokenizer.chat_template is None:
            if tools:
                raise UserError("The model has no chat template, so it cannot be told of tools: choose one that has.")
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            return list(self.tokenizer.encode(text))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return list(templated(self.tokenizer, messages, tools, add_generation_prompt=True, return_dict=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def forward(self, tokens: Tensor, lengths: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Run one level of the token tree.

        `tokens` `[B, T]` are right-padded to `lengths` `[B]`; `cache` holds the levels above, already
        expanded to B rows. Returns hidden states `[B, T, D]` and the cache that includes this level.
        """
        levels = [] if cache is None else cache.levels
        start = torch.zeros_like(lengths) if cache is None else cache.positions
        fresh = _Fresh(levels, self.layers)
        places = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self._run(tokens, places, fresh)
        padded = ~length_mask(lengths, tokens.shape[1])
        level = Level(fresh.keys, fresh.values, padded if bool(padded.any()) else None)
        return hidden, Cache([*levels, level], start + lengths)

    def step(self, tokens: Tensor, cache: Cache, level: Level, place: int | Tensor) -> Tensor:
        """One decoding step: `tokens` `[B]` enter `level` at `place`, one for all rows or `[B]`.

        Returns hidden states `[B, D]`.
        """
        places = torch.as_tensor(place, device=tokens.device).expand(len(tokens))
        growing = _Growing(cache.levels, level, places)
        return self._run(tokens[:, None], (cache.positions + places)[:, None], growing)[:, 0]

    def _run(self, tokens: Tensor, positions: Tensor, tree: Any) -> Tensor:
        base = architecture.trunk(self.module)
        inputs = self.module.get_input_embeddings()(tokens)
        if self.autocast is not None:
            inputs = inputs.float()  # what the layers add to is wide, also where the weights are narrow
        return base(inputs_embeds=inputs, position_ids=positions, use_cache=False, tree=tree).last_hidden_state

    @property
    def words(self) -> int:
        """Rows V of the table of the vocabulary; some may be padding, which no token has."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[..., V]` of hidden states `[..., D]`, in the type of this model's products."""
        if not self.way.linear or hasattr(self.module, "score"):
            return hidden  # they are the logits, or there are none
        return self.finished(self.module.get_output_embeddings()(hidden))

    def finished(self, logits: Tensor) -> Tensor:
        """The logits of what the unembedding says: scaled or capped, where the model does so."""
        return logits if self._finish is None else self._finish(logits)

    def rows(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states `[B, T, D]` of whole rows, filled up on the right, as transformers computes them."""
        return self._plain(pad(rows)[0].to(self.device), use_cache=False)[0]

    @torch.no_grad()
    def go_on(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Read `tokens` `[B, T]` after what the cache of transformers holds: hidden states at the end, `[B, D]`."""
        hidden, cache = self._plain(tokens, use_cache=True, **(cache or {}))
        return hidden[:, -1], cache

    def _plain(self, tokens: Tensor, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        whole = architecture.trunk(self.module) if self.way.linear else self.module
        found = whole(input_ids=tokens, **options)
        caches = {name: getattr(found, name, None) for name in ("past_key_values", "cache_params", "state")}
        cache = {name: held for name, held in caches.items() if held is not None}
        return (found.last_hidden_state if self.way.linear else found.logits), cache

    def read(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> tuple[Tensor, Cache]:
        """Read prompts, what they all share only once.

        Returns the hidden state at the end of each prompt, `[P, D]`, and the cache for `copies` rows a prompt.
        """
        shared = common_prefix(prompts) if len(prompts) > 1 else 0
        cache = None
        if shared:
            stem = torch.tensor([list(prompts[0][:shared])], device=self.device)
            _, cache = self(stem, torch.tensor([shared], device=self.device))
            cache = cache.expand(len(prompts))
        rest, lengths = (x.to(self.device) for x in pad([row[shared:] for row in prompts]))
        hidden, cache = self(rest, lengths, cache)
        last = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return last, cache.expand(copies)

    def logprob(self, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token, `[P, G, T]` each, 0 on padding.

        Computed once for equal beginnings, and only positions that predict a sampled token reach the vocabulary.
        """
        tree, path = token_tree(batch)
        sampled, back = path.unique(return_inverse=True)  # distinct sampled tokens, each in its context
        mask, device = batch.mask.to(self.device), self.device
        with self.precision():
            logits = self.logits(self.states(tree)[tree.parents[sampled].to(device)])
        known = token_logprob(logits, tree.tokens[sampled].to(device), temperature)
        empty, back = torch.zeros(mask.shape, device=device), back.to(device)
        logprob, entropy = (empty.masked_scatter(mask, x[back]) for x in known)
        return logprob, entropy

    def contexts(self, batch: TokenBatch, after: bool = False) -> Tensor:
        """Hidden states `[n, D]` of the n sampled tokens, in the order of `batch.completion[batch.mask]`.

        Those from which each was predicted or, `after`, those that have read it too.
        """
        tree, path = token_tree(batch)
        return self.states(tree)[(path if after else tree.parents[path]).to(self.device)]

    def extend(self, tokens: Tensor, cache: Cache, level: Level, place: int) -> Tensor:
        """Several decoding steps in one: known `tokens` `[B, n]` enter `level` from `place` on, over what is there.

        Returns hidden states `[B, n, D]`.
        """
        places = torch.arange(place, place + tokens.shape[1], device=tokens.device)
        return self._run(tokens, cache.positions[:, None] + places, _Appending(cache.levels, level, place))

    def states(self, tree: TokenTree) -> Tensor:
        """Hidden states `[N, D]` of the N tokens of a tree, each having read what is above it and itself."""
        if not self.way.shared:
            return self._row_by_row(tree)
        return self._run(tree.tokens[None].to(self.device), tree.positions[None].to(self.device), tree)[0]

    def _row_by_row(self, tree: TokenTree) -> Tensor:
        """As `states`, from whole rows: those that are not the beginning of another one."""
        parents = set(tree.parents.tolist())
        paths = [path for end, path in {path[-1]: path for path in tree.paths if path}.items() if end not in parents]
        hidden = self.rows([tree.tokens[path].tolist() for path in paths])
        where = {node: (row, place) for row, path in enumerate(paths) for place, node in enumerate(path)}
        row, place = torch.tensor([where[node] for node in range(len(tree))], device=hidden.device).T
        return hidden[row, place]


def _tell(module: Any, way: architecture.Way, context: int, why: str) -> None:
    """Warn of what a user should know about how this model is computed."""
    kind = type(module).__name__
    if not way.shared:
        warnings.warn(
            f"{kind} is computed row by row, as transformers does it: what prompts share is read again for each answer"
            f"{'' if way.cached else ', and each answer again for every token'}. That is slower, and right.",
            stacklevel=4,
        )
    if why:
        warnings.warn(f"The context of {kind} is {context} tokens here: {why}.", stacklevel=4)


class _Appending:
    """The tree as seen by several tokens that go on from `place` in a buffer: what the buffer has before is a level."""

    blocked = None

    def __init__(self, levels: list[Level], level: Level, place: int) -> None:
        before = Level([k[:, :, :place] for k in level.keys], [v[:, :, :place] for v in level.values])
        self.levels, self.level, self.place = [*levels, before] if place else levels, level, place

    def own(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, stop = self.level.keys[layer], self.level.values[layer], self.place + key.shape[2]
        keys[:, :, self.place : stop], values[:, :, self.place : stop] = key, value
        return key, value


def _check_tokenizer(module: Any, tokenizer: Any) -> None:
    """Raise UserError for a tokenizer of another model, and for a template after which the user would go on talking.

    Warns where the two only seem to be strangers.
    """
    rows, words = module.get_input_embeddings().num_embeddings, len(tokenizer)
    if words > rows:
        raise UserError(
            f"The tokenizer has {words} tokens and the model {rows}: it is another model's, or its vocabulary grew. In "
            "that case, call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    if words < ALIKE * rows:
        raise UserError(f"The tokenizer has {words} tokens and the model {rows}: it belongs to another model.")
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= rows:
        raise UserError(f"The tokenizer has a token {highest} and the model ends at {rows - 1}: it is another model's.")
    _check_special(module, tokenizer)
    if tokenizer.chat_template is None:
        return
    asked = [{"role": "user", "content": "question"}]

    def written(messages: list[Message], opened: bool) -> str:
        return str(templated(tokenizer, messages, add_generation_prompt=opened, tokenize=False))

    prompt = written(asked, True)
    answered = written([*asked, {"role": "assistant", "content": "reply"}], False)
    if prompt == written(asked, False) and not answered.removeprefix(prompt).lstrip().startswith("reply"):
        raise UserError(
            "The chat template of the model drops the generation prompt: it writes the same with and without "
            "add_generation_prompt, so that no answer would begin. Give the tokenizer a template that opens the "
            "assistant's turn."
        )


def _check_special(module: Any, tokenizer: Any) -> None:
    """Warn where model and tokenizer name two special tokens or more and agree on none, though there are as many words.

    One that differs is no sign: those who teach a model to chat give it another end.
    """
    theirs: dict[str, tuple[int, set[int]]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own, known = getattr(tokenizer, name, None), set[int]()
        for config in (module.config, getattr(module, "generation_config", None)):
            found = getattr(config, name, None)
            known |= set(found if isinstance(found, list) else [] if found is None else [found])
        if own is not None and known:
            theirs[name[:3]] = own, known
    if len(theirs) > 1 and not any(own in known for own, known in theirs.values()):
        read = ", ".join(f"{name} {own}" for name, (own, _) in theirs.items())
        meant = ", ".join(f"{name} {'/'.join(map(str, sorted(known)))}" for name, (_, known) in theirs.items())
        warnings.warn(
            f"The tokenizer may be another model's: its special tokens are {read}, and the model's {meant}. If it is, "
            "every word means another one to the model: take the tokenizer from the model's own folder.",
            stacklevel=3,
        )


def token_tree(batch: TokenBatch) -> tuple[TokenTree, Tensor]:
    """A batch as a tree, and where its sampled tokens are there, in the order of `batch.completion[batch.mask]`."""
    starts, lengths = batch.prompt_length.tolist(), batch.length.tolist()
    rows = zip(batch.prompts(), batch.completion.tolist(), lengths, strict=True)
    tree = TokenTree([prompt + row[:n] for prompt, group, ns in rows for row, n in zip(group, ns, strict=True)])
    first = [start for start, group in zip(starts, lengths, strict=True) for _ in group]
    places = [place for path, start in zip(tree.paths, first, strict=True) for place in path[start:]]
    known = torch.tensor(places, dtype=torch.int64)
    if batch.own is None:
        return tree, known
    return tree, known[batch.own[length_mask(batch.length, batch.completion.shape[-1])]]
