"""How a transformers model is computed: with shared prefixes, or row by row as transformers does.

Architectures differ in more than their config shows, so each is tested at load: a few tokens are computed in every way
that will be used, and compared with the model's own forward pass over each row alone. The fast way is used if it is
exact, else a slower one; a model that is not causal is refused. How far back a model attends cannot be tested with few
tokens and is read from its config.
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

CLOSE = 1e-3  # tolerance, in standard deviations: rounding errors are a tenth of this, wrong formulas larger
TOKENS = 12  # of the longest row tested
MEMORY = 2048  # default context, for configs without one
# Config fields that limit how far back a token attends, and the kind of layers that each applies to.
WINDOWS = {
    "sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention", "attention_window_size": None,
    "window_size": None, "local_attention": None, "keep_window_size": None, "index_topk": None,
}  # fmt: skip
# Kinds of layers in which a token attends to everything before it, up to a window.
WHOLE = ("full_attention", "sliding_attention", "chunked_attention")
PERIODIC = ("dynamic", "longrope")  # RoPE types whose angles change in longer texts


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a model supports, as tested at load, and so how it is computed.

    - `shared`: with shared prefixes (`nets.language.tokentree`, `LanguageModel.read`), or else in whole right-padded
      rows;
    - `linear`: logits are the scaled unembedding of the features; otherwise the logits are used in their place;
    - `cached`: rows of one length can be continued with the model's own cache. Not tested if `shared`.
    """

    shared: bool
    linear: bool = True
    cached: bool = False


def find(model: Any, attention: str) -> Capabilities:
    """Test how to compute a `LanguageModel`; sets its attention to `attention` if that is exact.

    Raises UserError for a model that cannot process text alone, is not causal, or has no gradient.
    """
    module = model.module
    own = module.config._attn_implementation
    prompts, ends = _rows(model)
    rows = [prompts[i // 2] + end for i, end in enumerate(ends)]
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        try:
            together = _whole(model, rows)
            alone = [x[: len(row)] for row, x in zip(rows, together, strict=True)]
            pairs = [(_whole(model, [rows[i]])[0], alone[i]) for i in (0, len(rows) - 1)]  # one of each prompt
        except Exception as error:  # any failure makes the model unusable
            raise UserError(
                f"{type(module).__name__} cannot run on text alone ({type(error).__name__}: {error}): choose a "
                "causal language model (Llama, Qwen, SmolLM)."
            ) from error
        if not _close(pairs):
            raise UserError(
                f"{type(module).__name__} is not causal: its logits at a token change with later tokens or with other "
                "rows of the batch. Choose a causal language model (Llama, Qwen, SmolLM)."
            )
        checkpointing.use(module)
        kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
        # Layers that choose what they attend to choose everything in rows as short as those tested.
        if getattr(module, "_supports_attention_backend", False) and not set(kinds) - set(WHOLE):
            model.capabilities = Capabilities(True)
            if _exact(lambda: _over_trees(model, attention, prompts, ends, alone)):
                return model.capabilities
            module.set_attn_implementation(own)
        model.capabilities = Capabilities(False)
        linear = _exact(lambda: [(model.logits(model.read_rows(rows[:1])[0]), alone[0])])
        model.capabilities = Capabilities(False, linear)
        cached = _exact(lambda: _continued(model, rows[0], alone[0]))
    try:
        _backward(model, rows[:1])
    except Exception:  # its layers may not support mixed precision
        model.autocast = None
        try:
            _backward(model, rows[:1])
        except Exception as error:
            raise UserError(
                f"{type(module).__name__} has no gradient ({type(error).__name__}: {error}): choose another model "
                "(Llama, Qwen, SmolLM)."
            ) from error
    return Capabilities(False, linear, cached)


def context(config: Any, shared: bool) -> tuple[int, str]:
    """The context of a model in tokens, and the reason if that is less than its positions (else "").

    With `shared` prefixes a token attends to everything before it, so the context ends where the model's would not.
    """
    places = int(getattr(config, "max_position_embeddings", None) or MEMORY)
    limits: list[tuple[int, str]] = []
    kinds = getattr(config, "layer_types", None)
    for name, kind in WINDOWS.items():
        window = getattr(config, name, None)
        if shared and isinstance(window, int) and window > 0 and (kinds is None or kind is None or kind in kinds):
            limits.append((int(window), f"its layers attend to {window} tokens back ({name})"))
    turns = getattr(config, "rope_parameters", None) or {}
    for one in (turns, *(x for x in turns.values() if isinstance(x, dict))):
        first = one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if one.get("rope_type") in PERIODIC:
            limits.append((int(first or places), f"its RoPE is {one['rope_type']}, which changes in longer texts"))
    fewest = min(limits, default=(places, ""))
    return fewest if fewest[0] < places else (places, "")


def finish(config: Any) -> Callable[[Tensor], Tensor] | None:
    """The function from the output of the unembedding to the logits, from the config; None: the identity.

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
    """Two prompts of different length with a shared prefix, and two endings of two tokens for each; no special tokens.

    They fit into the context.
    """
    most = max(min(TOKENS, model.context), 4)
    marks = set(getattr(model.tokenizer, "all_special_ids", ()))
    rows = model.module.get_input_embeddings().num_embeddings
    plain = [i for i in range(min(len(model.tokenizer), rows)) if i not in marks] or [0]
    drawn = torch.randint(len(plain), (4 * most,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [plain[i] for i in drawn]
    first = ids[: most - 2]
    second = [*first[: max(1, most // 3)], *ids[most : most + most // 3]][: max(1, most - 3)]
    return [first, second], [ids[2 * most + 2 * i :][:2] for i in range(4)]


def _whole(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Transformers' output for right-padded rows, `[B, T, …]`: logits, or features of a model with a `score` head."""
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
    """Outputs and references of a token tree, of decoding steps at unequal lengths, and of an extension."""
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
    """Outputs and references of the last tokens of a row, decoded one at a time with the model's own cache."""
    tokens = torch.tensor([row, row], device=model.device)
    features, cache = model.continue_rows(tokens[:, :-2])
    found = [(model.logits(features[1]), alone[len(row) - 3])]
    for place in (len(row) - 2, len(row) - 1):
        features, cache = model.continue_rows(tokens[:, place, None], cache)
        found.append((model.logits(features[1]), alone[place]))
    return found


def _backward(model: Any, rows: list[list[int]]) -> None:
    """Compute rows in the model's precision, and the gradient of one small weight near the input."""
    weights = [weight for weight in model.module.parameters() if weight.requires_grad]
    near = next((weight for weight in weights if weight.dim() == 1), None)
    with model.precision(), torch.enable_grad():
        total = model.logits(model.read_rows(rows)).float().sum()
        if near is not None:
            torch.autograd.grad(total, near, allow_unused=True)


def _exact(compute: Callable[[], list[tuple[Tensor, Tensor]]]) -> bool:
    """Whether the computed outputs equal their references; False if computing them fails."""
    try:
        return _close(compute())
    except Exception:  # third-party code, called in unusual ways
        return False


def _close(pairs: Any) -> bool:
    """Whether outputs equal their references but for rounding."""
    for found, expected in pairs:
        spread = expected.float().std().item()
        if found.shape != expected.shape or not (found.float() - expected.float()).abs().max().item() <= CLOSE * spread:
            return False
    return True
