"""How a model of transformers is computed: over tokens that rows share, or row by row as transformers does it.

Architectures differ in more than their configurations say, so that nothing is believed: at load a few tokens are
computed in every way in which they are going to be, and held against the model's own forward pass over each row alone.
The fast way is taken where it is right, a slower one where only that is, and what does not read from left to right is
refused. What no few tokens can show, how far back a model looks, is read from its configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data.text import pad
from foresight.errors import UserError
from foresight.nets.language import checkpointing
from foresight.nets.language.cache import Level
from foresight.nets.language.tokentree import TokenTree

CLOSE = 1e-3  # of the spread of the right numbers: rounding is a tenth of this at most, another formula is not
TOKENS = 12  # of the longest row that is tried
MEMORY = 2048  # the context of a model that does not say how many tokens it can read
# How far back a token sees, or how many tokens, as configurations call it, and the kind of layers for which it is so.
REACH = {
    "sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention", "attention_window_size": None,
    "window_size": None, "local_attention": None, "keep_window_size": None, "index_topk": None,
}  # fmt: skip
PERIODIC = ("dynamic", "longrope")  # rotary angles that are other ones once the longest row passes a length


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model's numbers come about, as was found to be right.

    - `shared`: over trees of tokens (`nets.language.tokentree`, `LanguageModel.read`), or else whole rows, padded on
      the right;
    - `linear`: logits are the unembedding of the features, scaled; otherwise the logits stand in for the features;
    - `cached`: rows of one length may be continued with the cache that the model makes. Not asked where `shared`.
    """

    shared: bool
    linear: bool = True
    cached: bool = False


def find(model: Any, attention: str) -> Way:
    """How a `LanguageModel` is computed rightly; its attention is `attention` afterward if rows share tokens.

    Raises UserError for a model that cannot read a text by itself, or does not read it from left to right.
    """
    module = model.module
    own = module.config._attn_implementation
    prompts, ends = _rows(model)
    rows = [prompts[i // 2] + end for i, end in enumerate(ends)]
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        try:
            together = _whole(model, rows)
            alone = [x[: len(row)] for row, x in zip(rows, together, strict=True)]
            pairs = [(_whole(model, [rows[i]])[0], alone[i]) for i in (0, len(rows) - 1)]  # of each prompt one
        except Exception as error:  # whatever it is, nothing can be done with this model
            raise UserError(
                f"{type(module).__name__} cannot read a text by itself ({type(error).__name__}: {error}): choose a "
                "causal language model (Llama, Qwen, SmolLM)."
            ) from error
        if not _close(pairs):
            raise UserError(
                f"{type(module).__name__} does not read from left to right: what stands behind a token, or in another "
                "row, changes its numbers. Choose a causal language model (Llama, Qwen, SmolLM)."
            )
        checkpointing.use(module)
        if getattr(module, "_supports_attention_backend", False):
            model.way = Way(True)
            if _right(lambda: _over_trees(model, attention, prompts, ends, alone)):
                return model.way
            module.set_attn_implementation(own)
        model.way = Way(False)
        linear = _right(lambda: [(model.logits(model.read_rows(rows[:1])[0]), alone[0])])
        model.way = Way(False, linear)
        cached = _right(lambda: _continued(model, rows[0], alone[0]))
    try:
        _learns(model, rows[:1])
    except Exception:  # its own layers may not mix types
        model.autocast = None
        try:
            _learns(model, rows[:1])
        except Exception as error:  # as above
            raise UserError(
                f"{type(module).__name__} gives no gradient ({type(error).__name__}: {error}): choose another model "
                "(Llama, Qwen, SmolLM)."
            ) from error
    return Way(False, linear, cached)


def context(config: Any, shared: bool) -> tuple[int, str]:
    """How many tokens a model reads as `shared` has it, and why that is fewer than it has places for ("": it is not).

    Over a tree a token sees all that is above it, as far back as that is.
    """
    places = int(getattr(config, "max_position_embeddings", None) or MEMORY)
    limits: list[tuple[int, str]] = []
    kinds = getattr(config, "layer_types", None)
    for name, kind in REACH.items():
        reach = getattr(config, name, None)
        if shared and isinstance(reach, int) and reach > 0 and (kinds is None or kind is None or kind in kinds):
            limits.append((int(reach), f"its layers look back {reach} tokens ({name})"))
    turns = getattr(config, "rope_parameters", None) or {}
    for one in (turns, *(x for x in turns.values() if isinstance(x, dict))):
        first = one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if one.get("rope_type") in PERIODIC:
            limits.append((int(first or places), f"its positions are {one['rope_type']}, other ones in longer texts"))
    fewest = min(limits, default=(places, ""))
    return fewest if fewest[0] < places else (places, "")


def finish(config: Any) -> Callable[[Tensor], Tensor] | None:
    """What comes between the unembedding and the logits, by the names that configurations have for it; None: nothing.

    Granite divides (`logits_scaling`), Cohere multiplies (`logit_scale`), Gemma 2 caps (arXiv:2408.00118, §2).
    """
    times = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    if cap:
        return lambda logits: (logits * (times / cap)).tanh() * cap
    return None if times == 1.0 else lambda logits: logits * times


def trunk(module: nn.Module) -> Any:
    """The model without its head."""
    return getattr(module, str(module.base_model_prefix))


def _rows(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Two prompts that begin alike and are not equally long, and two ends of two tokens for each; all plain words.

    They are as short as the context asks for.
    """
    most = max(min(TOKENS, model.context), 4)
    marks = set(getattr(model.tokenizer, "all_special_ids", ()))
    words = [i for i in range(len(model.tokenizer)) if i not in marks] or [0]
    drawn = torch.randint(len(words), (4 * most,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [words[i] for i in drawn]
    first = ids[: most - 2]
    second = [*first[: max(1, most // 3)], *ids[most : most + most // 3]][: max(1, most - 3)]
    return [first, second], [ids[2 * most + 2 * i :][:2] for i in range(4)]


def _whole(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """What transformers makes of rows, padded on the right: logits, or features where there is a score: `[B, T, …]`."""
    tokens = pad(rows)[0].to(model.device)
    if hasattr(model.module, "score"):
        found: Tensor = trunk(model.module)(input_ids=tokens, use_cache=False).last_hidden_state
        return found
    logits: Tensor = model.module(input_ids=tokens, use_cache=False).logits
    if logits.shape[:2] != tokens.shape:
        raise ValueError(f"logits of the shape {tuple(logits.shape)}")
    return logits


def _over_trees(
    model: Any, attention: str, prompts: list[list[int]], ends: list[list[int]], alone: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Numbers of a tree of rows, of a cache that grows for each row by itself, and of one that is extended."""
    module, device = model.module, model.device
    module.set_attn_implementation(attention)
    tree = TokenTree([prompts[i // 2] + end for i, end in enumerate(ends)])
    features = model.states(tree)
    found = [(model.logits(features[path]), x) for path, x in zip(tree.paths, alone, strict=True)]
    last, few = model.read(prompts)
    cache = few.expand(2)
    sizes = [len(prompts[i // 2]) for i in range(4)]
    found += [(model.logits(last[i // 2]), alone[i][sizes[i] - 1]) for i in range(4)]

    def room(rows: int, level: Any) -> Any:
        def empty(parts: list[Tensor]) -> list[Tensor]:
            return [x.new_zeros(rows, x.shape[1], 2, x.shape[3]) for x in parts]

        return Level(empty(level.keys), empty(level.values))

    level = room(4, cache.levels[-1])
    for places in ([0, 0, 0, 0], [1, 1, 0, 0]):
        entered = torch.tensor([end[place] for end, place in zip(ends, places, strict=True)], device=device)
        hidden = model.step(entered, cache, level, torch.tensor(places, device=device))
        found += [(model.logits(hidden[i]), alone[i][sizes[i] + places[i]]) for i in range(4)]
    hidden = model.extend(torch.tensor(ends[::2], device=device), few, room(2, cache.levels[-1]), 0)
    return [*found, *((model.logits(hidden[i]), alone[2 * i][sizes[2 * i] :]) for i in range(2))]


def _continued(model: Any, row: list[int], alone: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Numbers of the last tokens of a row, read one after another over the model's own cache."""
    tokens = torch.tensor([row, row], device=model.device)
    features, cache = model.continue_rows(tokens[:, :-2])
    found = [(model.logits(features[1]), alone[len(row) - 3])]
    for place in (len(row) - 2, len(row) - 1):
        features, cache = model.continue_rows(tokens[:, place, None], cache)
        found.append((model.logits(features[1]), alone[place]))
    return found


def _learns(model: Any, rows: list[list[int]]) -> None:
    """Compute rows in the type of a model's products, and a gradient: that of a small weight near the beginning."""
    weights = [weight for weight in model.module.parameters() if weight.requires_grad]
    near = next((weight for weight in weights if weight.dim() == 1), None)
    with model.precision(), torch.enable_grad():
        total = model.logits(model.read_rows(rows)).float().sum()
        if near is not None:
            torch.autograd.grad(total, near, allow_unused=True)


def _right(compute: Callable[[], list[tuple[Tensor, Tensor]]]) -> bool:
    """Whether what is computed is what it should be; a way in which nothing can be computed is not."""
    try:
        return _close(compute())
    except Exception:  # other people's code, called as it was not meant to be
        return False


def _close(pairs: Any) -> bool:
    """Whether numbers equal the right ones but for rounding."""
    for found, right in pairs:
        spread = right.float().std().item()
        if found.shape != right.shape or not (found.float() - right.float()).abs().max().item() <= CLOSE * spread:
            return False
    return True
