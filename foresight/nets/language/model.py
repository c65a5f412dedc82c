"""A transformers causal language model as a policy, which computes shared prefixes once.

Prompts of one group are equal, and prompts of one batch often share a prefix (a system message), so the tokens of a
batch form a tree. A training pass runs given texts as one `TokenTree`: it costs the *distinct* tokens and is exact. For
sampling, `LanguageModel.forward` runs one level of the tree (shared prefix, prompts, completions) over the levels
above it, with an explicit `Cache`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data.text import TokenBatch, common_prefix, length_mask, pad
from foresight.errors import UserError
from foresight.nets.language import architecture, tree_attention
from foresight.nets.language.architecture import Capabilities
from foresight.nets.language.cache import Cache, DecodeStep, Extension, Level, Prefill
from foresight.nets.language.tokenizer import Message, apply_chat_template, check_ids, ids_of
from foresight.nets.language.tokenizer import check as check_tokenizer
from foresight.nets.language.tokentree import TokenTree
from foresight.ops.tokens import token_logprob

CAPABILITIES = "_foresight_capabilities"  # the attribute of a module that holds its `Capabilities`


class LanguageModel(nn.Module):
    """A causal language model and its tokenizer: tokens in, next-token distributions out.

    `autocast` is the dtype of matrix products (None: that of the weights). Dropout is always off. `completer`, if set,
    samples instead: a server with the same weights (`planning.generation.server`). `collector`, if set, gathers the
    groups to train on (`planning.generation.asynchronous`). `capabilities` are those of the model: without shared
    prefixes `forward`, `read`, `step` and `extend` cannot be used, only `read_rows` and `continue_rows`.
    """

    completer: Any = None
    collector: Any = None

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        autocast: torch.dtype | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__()
        tree_attention.register()
        check_tokenizer(module, tokenizer)
        config = module.config.get_text_config()
        self.module = module.eval()
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.layers: int = getattr(config, "num_hidden_layers", 0)
        self._finish = architecture.finish(config)
        self.context, _ = architecture.context(config, shared=True)
        known = capabilities or vars(module).get(CAPABILITIES)
        self.capabilities: Capabilities = known or architecture.find(self, tree_attention.ATTENTION)
        vars(module)[CAPABILITIES] = self.capabilities  # a model in training, or sharded, is not tried again
        self.context, why = architecture.context(config, self.capabilities.shared)
        if known is None:
            _warn(module, self.capabilities, self.context, why)
        eos = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
        self.stop_ids: list[int] = sorted(i for i in ids if i is not None)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def precision(self) -> torch.autocast:
        """The autocast context of this model."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def encode(self, prompt: str | Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a plain prompt or a conversation, with the model's chat template if it has one.

        `tools` are JSON schemas of the functions that the model may call. Raises UserError if the
        model cannot be given them, and for a token that it has no embedding of.
        """
        if self.tokenizer.chat_template is None:
            if tools:
                raise UserError(
                    "The model has no chat template, so it cannot be given tools: choose a model that has one."
                )
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            return check_ids(self.module, self.tokenizer, ids_of(self.tokenizer, text))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = apply_chat_template(self.tokenizer, messages, tools, add_generation_prompt=True, return_dict=False)
        return check_ids(self.module, self.tokenizer, list(ids))

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
        prefill = Prefill(levels, self.layers)
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self._run(tokens, positions, prefill)
        padded = ~length_mask(lengths, tokens.shape[1])
        level = Level(prefill.keys, prefill.values, padded if bool(padded.any()) else None)
        return hidden, Cache([*levels, level], start + lengths)

    def step(self, tokens: Tensor, cache: Cache, level: Level, place: int | Tensor) -> Tensor:
        """One decoding step: `tokens` `[B]` are written into `level` at `place`, one for all rows or `[B]`.

        Returns hidden states `[B, D]`.
        """
        places = torch.as_tensor(place, device=tokens.device).expand(len(tokens))
        view = DecodeStep(cache.levels, level, places)
        return self._run(tokens[:, None], (cache.positions + places)[:, None], view)[:, 0]

    def _run(self, tokens: Tensor, positions: Tensor, tree: Any) -> Tensor:
        base = architecture.trunk(self.module)
        inputs = self.module.get_input_embeddings()(tokens)
        if self.autocast is not None:
            inputs = inputs.float()  # a float32 residual stream, also with bfloat16 weights
        return base(inputs_embeds=inputs, position_ids=positions, use_cache=False, tree=tree).last_hidden_state

    @property
    def vocab_size(self) -> int:
        """Rows V of the unembedding; some may be padding that no token uses."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[..., V]` of hidden states `[..., D]`, in the dtype of this model's products."""
        if not self.capabilities.linear or hasattr(self.module, "score"):
            return hidden  # already logits, or a model without a vocabulary
        return self.scaled(self.module.get_output_embeddings()(hidden))

    def scaled(self, logits: Tensor) -> Tensor:
        """The final logits of the output of the unembedding: scaled or soft-capped, where the model does so."""
        return logits if self._finish is None else self._finish(logits)

    def read_rows(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states `[B, T, D]` of whole rows, right-padded, as transformers computes them."""
        return self._plain(pad(rows)[0].to(self.device), use_cache=False)[0]

    @torch.no_grad()
    def continue_rows(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Append `tokens` `[B, T]` to the cache of transformers: the last hidden states `[B, D]`, and the cache."""
        hidden, cache = self._plain(tokens, use_cache=True, **(cache or {}))
        return hidden[:, -1], cache

    def _plain(self, tokens: Tensor, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        whole = architecture.trunk(self.module) if self.capabilities.linear else self.module
        output = whole(input_ids=tokens, **options)
        caches = {name: getattr(output, name, None) for name in ("past_key_values", "cache_params", "state")}
        cache = {name: held for name, held in caches.items() if held is not None}
        return (output.last_hidden_state if self.capabilities.linear else output.logits), cache

    def read(self, prompts: Sequence[Sequence[int]], copies: int = 1) -> tuple[Tensor, Cache]:
        """Prefill prompts; the prefix that all share is computed once.

        Returns the hidden state at the end of each prompt, `[P, D]`, and the cache for `copies` rows a prompt.
        """
        shared = common_prefix(prompts) if len(prompts) > 1 else 0
        cache = None
        if shared:
            prefix = torch.tensor([list(prompts[0][:shared])], device=self.device)
            _, cache = self(prefix, torch.tensor([shared], device=self.device))
            cache = cache.expand(len(prompts))
        rest, lengths = (x.to(self.device) for x in pad([row[shared:] for row in prompts]))
        hidden, cache = self(rest, lengths, cache)
        last = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return last, cache.expand(copies)

    def logprob(self, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token, `[P, G, T]` each, 0 on padding.

        Shared prefixes are computed once, and logits only at positions that predict a sampled token.
        """
        tree, path = token_tree(batch)
        sampled, back = path.unique(return_inverse=True)  # distinct sampled tokens, each in its context
        mask, device = batch.mask.to(self.device), self.device
        with self.precision():
            logits = self.logits(self.states(tree)[tree.parents[sampled].to(device)])
        scores = token_logprob(logits, tree.tokens[sampled].to(device), temperature)
        empty, back = torch.zeros(mask.shape, device=device), back.to(device)
        logprob, entropy = (empty.masked_scatter(mask, x[back]) for x in scores)
        return logprob, entropy

    def contexts(self, batch: TokenBatch, after: bool = False) -> Tensor:
        """Hidden states `[n, D]` of the n sampled tokens, in the order of `batch.completion[batch.mask]`.

        The state that predicts each token or, with `after`, the state after reading it.
        """
        tree, path = token_tree(batch)
        return self.states(tree)[(path if after else tree.parents[path]).to(self.device)]

    def extend(self, tokens: Tensor, cache: Cache, level: Level, place: int) -> Tensor:
        """Several decoding steps in one: `tokens` `[B, n]` are written into `level` from `place` on.

        Returns hidden states `[B, n, D]`.
        """
        places = torch.arange(place, place + tokens.shape[1], device=tokens.device)
        return self._run(tokens, cache.positions[:, None] + places, Extension(cache.levels, level, place))

    def states(self, tree: TokenTree) -> Tensor:
        """Hidden states `[N, D]` of the N tokens of a tree, each after its ancestors and itself."""
        if not self.capabilities.shared:
            return self._row_by_row(tree)
        return self._run(tree.tokens[None].to(self.device), tree.positions[None].to(self.device), tree)[0]

    def _row_by_row(self, tree: TokenTree) -> Tensor:
        """As `states`, computed from the rows that are not a prefix of another one."""
        parents = set(tree.parents.tolist())
        paths = [path for end, path in {path[-1]: path for path in tree.paths if path}.items() if end not in parents]
        hidden = self.read_rows([tree.tokens[path].tolist() for path in paths])
        where = {node: (row, place) for row, path in enumerate(paths) for place, node in enumerate(path)}
        row, place = torch.tensor([where[node] for node in range(len(tree))], device=hidden.device).T
        return hidden[row, place]


def _warn(module: Any, capabilities: Capabilities, context: int, why: str) -> None:
    """Warn if this model is slower or has a shorter context here than the user may expect."""
    kind = type(module).__name__
    if not capabilities.shared:
        warnings.warn(
            f"{kind} is computed row by row, as in transformers: shared prefixes are computed again for each answer"
            f"{'' if capabilities.cached else ', and each answer again for every token'}. The result is the same, but "
            "slower.",
            stacklevel=4,
        )
    if why:
        warnings.warn(f"The context of {kind} is limited to {context} tokens here: {why}.", stacklevel=4)


def token_tree(batch: TokenBatch) -> tuple[TokenTree, Tensor]:
    """A batch as a tree, and the nodes of its sampled tokens, in the order of `batch.completion[batch.mask]`."""
    starts, lengths = batch.prompt_length.tolist(), batch.length.tolist()
    rows = zip(batch.prompts(), batch.completion.tolist(), lengths, strict=True)
    tree = TokenTree([prompt + row[:n] for prompt, group, ns in rows for row, n in zip(group, ns, strict=True)])
    first = [start for start, group in zip(starts, lengths, strict=True) for _ in group]
    places = [place for path, start in zip(tree.paths, first, strict=True) for place in path[start:]]
    nodes = torch.tensor(places, dtype=torch.int64)
    if batch.own is None:
        return tree, nodes
    return tree, nodes[batch.own[length_mask(batch.length, batch.completion.shape[-1])]]
