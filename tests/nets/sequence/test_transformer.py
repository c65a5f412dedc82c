"""Laws of the transformer: what it must not notice (padding, the future, a cache), and Llama as the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foresight.errors import UserError
from foresight.nets.sequence import transformer as subject
from foresight.nets.sequence.attention import attend_eager, recorded
from foresight.nets.sequence.transformer import Transformer, TransformerConfig, from_llama, llama_config
from tests.sabotage import change, drop, sabotaged_by

ROPE = TransformerConfig(layers=2, dim=32, heads=4, kv_heads=2, vocab=50)
LEARNED = TransformerConfig(
    layers=2, dim=32, heads=4, vocab=50, positions="learned", norm="layer", activation="gelu", bias=True, tied=False
)
CONFIGS = pytest.mark.parametrize("config", [ROPE, LEARNED], ids=["llama", "gpt2"])


def build(config: TransformerConfig, scale: float = 5.0) -> Transformer:
    """A model whose attention is far from uniform: the usual initialization would hide mistakes."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def tokens(batch: int = 3, steps: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(0, 50, (batch, steps), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance * max(1.0, b.abs().max().item()))


# ---- mutations: each law must fail under those that break it ---------------------------------------------------------

HERE = "foresight.nets.sequence.transformer"
ATTENTION = "foresight.nets.sequence.attention"
Function = Callable[..., Any]


def no_rotation(original: Function) -> Function:
    return lambda x, cos, sin: x


def half_rotation(original: Function) -> Function:
    """The sign of one sine is wrong."""
    return lambda x, cos, sin: torch.cat(
        (original(x, cos, sin).chunk(2, -1)[0], original(x, cos, -sin).chunk(2, -1)[1]), -1
    )


def slot_positions(original: Function) -> Function:
    """Padding takes positions too."""
    return lambda cache, real, batch, steps, device: original(cache, None, batch, steps, device)


def restarted_positions(original: Function) -> Function:
    """Positions start at 0 with every call."""
    return lambda cache, real, batch, steps, device: torch.arange(steps).expand(batch, steps)


def sees_all(original: Function) -> Function:
    return lambda real, length, steps, device: torch.ones(1, 1, steps, length + steps, dtype=torch.bool)


def sees_padding(original: Function) -> Function:
    return lambda real, length, steps, device: original(None, length, steps, device)


def sees_itself(original: Function) -> Function:
    return lambda real, length, steps, device: torch.eye(steps, dtype=torch.bool)[None, None]


def not_causal(original: Function) -> Function:
    return lambda *args, is_causal, **kwargs: original(*args, **kwargs)


def unscaled(original: Function) -> Function:
    return lambda query, key, *rest: original(query * math.sqrt(query.shape[-1]), key, *rest)


def interleaved(original: Function) -> Function:
    """Key-value head h serves heads h, h + kv_heads, ... instead of its own group."""

    def mutant(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        return original(query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), *rest)

    return mutant


# ---- laws ------------------------------------------------------------------------------------------------------------


@CONFIGS
@pytest.mark.parametrize("slots", [None, 9, 32])
@sabotaged_by(f"{HERE}._positions", restarted_positions)
@sabotaged_by(f"{HERE}._allowed", sees_all)
def test_cached_is_uncached(config: TransformerConfig, slots: int | None) -> None:
    model, x = build(config), tokens()
    with torch.no_grad():
        whole, _ = model(x)
        cache, parts = model.empty_cache(3, slots), []
        for piece in x.split([4, 1, 1, 3], dim=1):
            out, cache = model(piece, cache)
            parts.append(out)
    assert cache.length == 9
    assert cache.lengths.tolist() == [9, 9, 9]
    close(torch.cat(parts, dim=1), whole)


def check_padding(config: TransformerConfig, side: str, slots: int | None) -> None:
    """Rows of 9, 6 and 3 tokens in one batch, read and continued by two more, equal each row alone."""
    model, x, more = build(config), tokens(), tokens(steps=2, seed=2)
    lengths = [9, 6, 3]
    padded, mask = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.bool)
    for row, n in enumerate(lengths):
        where = slice(9 - n, None) if side == "left" else slice(0, n)
        padded[row, where], mask[row, where] = x[row, :n], True
    with torch.no_grad():
        out, cache = model(padded, model.empty_cache(3, slots), mask=mask)
        assert cache.lengths.tolist() == lengths
        first, cache = model(more[:, :1], cache)
        second, _ = model(more[:, 1:], cache)
        for row, n in enumerate(lengths):
            alone, _ = model(torch.cat((x[row, :n], more[row]))[None])
            close(torch.cat((out[row, mask[row]], first[row], second[row])), alone[0])


@CONFIGS
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("slots", [None, 11])
@sabotaged_by(f"{HERE}._allowed", sees_padding)
@sabotaged_by(f"{HERE}._positions", restarted_positions)
def test_padding_changes_nothing(config: TransformerConfig, side: str, slots: int | None) -> None:
    check_padding(config, side, slots)


# Rotary positions are relative, so a shift of the whole row by its padding on the left is none of their business.
@pytest.mark.parametrize(("config", "side"), [(LEARNED, "left"), (LEARNED, "right"), (ROPE, "right")])
@sabotaged_by(f"{HERE}._positions", slot_positions)
def test_padding_takes_no_position(config: TransformerConfig, side: str) -> None:
    check_padding(config, side, None)


@CONFIGS
@sabotaged_by("torch.nn.functional.scaled_dot_product_attention", not_causal)
def test_the_future_changes_nothing(config: TransformerConfig) -> None:
    model, x = build(config), tokens()
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    close(after[:, :5], before[:, :5], 1e-6)
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 0.1


@CONFIGS
@sabotaged_by(f"{ATTENTION}.attend_eager", unscaled, drop("allowed"))
@sabotaged_by(f"{HERE}._allowed", sees_all)
def test_recorded_attention_is_the_fused_one_and_its_rows_sum_to_one(config: TransformerConfig) -> None:
    model, x = build(config), tokens()
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, :4] = False
    with torch.no_grad():
        for given in (None, mask):
            fast, cache = model(x[:, :7], mask=None if given is None else given[:, :7])
            with recorded() as weights:
                slow, other = model(x[:, :7], mask=None if given is None else given[:, :7])
            close(slow, fast)
            with recorded():
                close(model(x[:, 7:], other)[0], model(x[:, 7:], cache)[0])
            assert len(weights) == config.layers
            for layer in weights:
                assert layer.shape == (3, config.heads, 7, 7)
                close(layer.sum(dim=-1), torch.ones(3, config.heads, 7))
                assert layer.triu(1).abs().max() == 0
                if given is not None:
                    assert layer[1, :, 4:, :4].abs().max() == 0


@sabotaged_by(f"{HERE}.rotate", no_rotation, half_rotation)
def test_rotary_scores_are_relative() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 6, 16)

    def scores(shift: int) -> Tensor:
        angles = subject.rotary_angles(torch.arange(6)[None] + shift, 16, 10_000.0)
        return subject.rotate(query, *angles) @ subject.rotate(key, *angles).transpose(-1, -2)

    close(scores(37), scores(0), 1e-4)
    angles = subject.rotary_angles(torch.arange(6)[None], 16, 10_000.0)
    close(subject.rotate(query, *angles).norm(dim=-1), query.norm(dim=-1))
    assert (scores(0) - query @ key.transpose(-1, -2)).abs().max() > 0.1


@sabotaged_by(f"{HERE}.rotate", half_rotation)
def test_shifted_positions_change_nothing() -> None:
    model, x = build(ROPE), tokens()
    with torch.no_grad():
        close(model(x, positions=torch.arange(9).expand(3, 9) + 100)[0], model(x)[0], 1e-4)


@sabotaged_by(f"{ATTENTION}.attend_eager", unscaled, interleaved, drop("allowed"))
def test_attention_is_its_definition() -> None:
    """Against the sum written with loops, one query at a time."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    allowed = torch.rand(2, 1, 3, 5) > 0.3
    allowed[..., 0] = True
    got, weights = attend_eager(query, key, value, allowed)
    for b in range(2):
        for head in range(4):
            for t in range(3):
                score = [math.exp(float(query[b, head, t] @ key[b, head // 2, s]) / math.sqrt(8)) for s in range(5)]
                score = [w if allowed[b, 0, t, s] else 0.0 for s, w in enumerate(score)]
                expected = torch.tensor(score) / sum(score)
                close(weights[b, head, t], expected)
                close(got[b, head, t], expected @ value[b, head // 2])


@pytest.mark.parametrize("tied", [True, False])
@sabotaged_by(f"{HERE}.rotate", no_rotation, half_rotation)
@sabotaged_by(f"{HERE}.rotary_angles", change("base", lambda base: 2 * base))
def test_llama_weights_give_the_same_logits(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_theta=5_000.0,
        rms_norm_eps=1e-4,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        ours = from_llama(llama.state_dict(), llama_config(config.to_dict())).eval()
        x = tokens()
        close(ours(x)[0], llama(x).logits)
        mask = torch.ones(3, 9, dtype=torch.bool)
        mask[0, :5] = False
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        theirs = llama(x, attention_mask=mask.long(), position_ids=positions).logits
        close(ours(x, mask=mask)[0][mask], theirs[mask])


# ---- the carry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 16])
def test_select_repeats_a_prompt_for_its_group(slots: int | None) -> None:
    model, prompt, more = build(ROPE), tokens(batch=2, steps=5), tokens(batch=4, steps=3, seed=2)
    rows = torch.tensor([0, 0, 1, 1])
    with torch.no_grad():
        _, once = model(prompt, model.empty_cache(2, slots))
        branched, _ = model(more, once.select(rows))
        whole, _ = model(torch.cat((prompt[rows], more), dim=1))
    close(branched, whole[:, 5:])


@pytest.mark.parametrize("slots", [None, 16])
def test_forget_resets_a_row(slots: int | None) -> None:
    model, x = build(ROPE), tokens(batch=2)
    with torch.no_grad():
        _, cache = model(x[:, :6], model.empty_cache(2, slots))
        out, cache = model(x[:, 6:], cache.reset(torch.tensor([0.0, 1.0])))
        close(out[0], model(x)[0][0, 6:])
        close(out[1], model(x[:, 6:])[0][1])
    assert cache.lengths.tolist() == [9, 3]


def test_a_grown_cache_leaves_the_old_one_valid() -> None:
    model, x = build(ROPE), tokens()
    with torch.no_grad():
        _, old = model(x[:, :4], model.empty_cache(3, 16))
        first, _ = model(x[:, 4:6], old)
        again, _ = model(x[:, 4:6], old)
    assert old.length == 4
    assert torch.equal(first, again)


def test_gradients_flow_through_a_growing_cache() -> None:
    model, x = build(ROPE), tokens()

    def gradient(pieces: list[int]) -> Tensor:
        cache, parts = None, []
        for piece in x.split(pieces, dim=1):
            out, cache = model(piece, cache)
            parts.append(out)
        loss = F.cross_entropy(torch.cat(parts, dim=1)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        return torch.autograd.grad(loss, model.blocks[0].attention.qkv.weight)[0]

    whole = gradient([9])
    assert whole.abs().max() > 1e-3
    close(gradient([4, 5]), whole)


def test_a_static_cache_refuses_what_it_cannot_do() -> None:
    model, x = build(ROPE), tokens()
    with torch.no_grad(), pytest.raises(ValueError, match="8 slots, but 9 are needed"):
        model(x, model.empty_cache(3, 8))
    with pytest.raises(ValueError, match="gradients"):
        model(x, model.empty_cache(3, 16))


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_embeddings_go_in_and_features_come_out() -> None:
    config = replace(ROPE, vocab=None)
    model, x = build(config), torch.randn(2, 5, 32)
    out, cache = model(x)
    assert out.shape == (2, 5, 32)
    assert cache.keys[0].shape == (2, 2, 5, 8)
    with pytest.raises(ValueError, match="no vocabulary"):
        model.logits(out)


def test_embeddings_of_tokens_are_the_tokens() -> None:
    model, x = build(ROPE), tokens()
    with torch.no_grad():
        assert torch.equal(model(model.embed(x))[0], model(x)[0])
        features, _ = model.features(x)
        assert torch.equal(model.logits(features), model(x)[0])


def test_dropout_only_when_training() -> None:
    model, x = build(replace(ROPE, dropout=0.5)), tokens()
    with torch.no_grad():
        assert torch.equal(model(x)[0], model(x)[0])
        model.train()
        assert not torch.equal(model(x)[0], model(x)[0])


@pytest.mark.learning
@sabotaged_by(f"{HERE}._allowed", sees_itself)
def test_it_learns_to_repeat() -> None:
    """Six random tokens, then the same again: only attention to the first half makes the second certain."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(layers=2, dim=64, heads=4, vocab=16))
    one = torch.randint(0, 16, (1, 12))
    other = torch.cat(((one[:, :1] + 1) % 16, one[:, 1:]), dim=1)
    assert not torch.allclose(model(one)[0][:, 6:], model(other)[0][:, 6:])  # the first half is seen at all
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(300):
        half = torch.randint(0, 16, (32, 6))
        x = torch.cat((half, half), dim=1)
        logits, _ = model(x[:, :-1])
        loss = F.cross_entropy(logits[:, 6:].flatten(0, 1), x[:, 7:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(16)) < 0.1  # the untrained baseline: all tokens equally likely
    assert sum(losses[-10:]) / 10 < 0.8


@sabotaged_by(f"{HERE}.Attention.forward", change("pick", lambda pick: lambda x: pick(x.roll(1, 1))))
@pytest.mark.parametrize("padded", [False, True])
def test_picked_steps_have_the_outputs_of_all_steps(padded: bool) -> None:
    """The last layer computes them alone; what is cached is that of all steps."""
    model, x = build(replace(LEARNED, positions="none")), tokens()
    mask = torch.ones_like(x).bool()
    mask[0, :4] = not padded
    every, cache = model(x, mask=mask if padded else None)
    some, same = model(x, mask=mask if padded else None, pick=lambda y: y[:, 1::3])
    first = 2 if padded else 0  # outputs at padding are undefined
    close(some[:, first:], every[:, 1::3][:, first:])
    for a, b in zip(cache.keys, same.keys, strict=True):
        close(a, b)
    unpadded = model(x[:1, 4:])[0]
    assert not padded or torch.allclose(some[0, -1], unpadded[0, -2], atol=1e-4)
    with recorded() as weights:
        shown = model(x, pick=lambda y: y[:, 1::3])[0]
    assert weights[-1].shape[-2] == x.shape[1] and shown.shape[1] == 3


def test_without_positions_the_order_of_what_was_read_is_not_seen() -> None:
    model, x = build(replace(LEARNED, positions="none", layers=1)), tokens()
    swapped = x[:, [1, 0, *range(2, x.shape[1])]]
    close(model(x)[0][:, 2:], model(swapped)[0][:, 2:])
    assert not torch.allclose(build(LEARNED)(x)[0][:, 2:], build(LEARNED)(swapped)[0][:, 2:], atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "sine"}, "Valid: learned, none, rope"),
        ({"norm": "batch"}, "Valid: layer, rms"),
        ({"activation": "relu"}, "Valid: gelu, swiglu"),
        ({"heads": 5}, "not a multiple of heads=5"),
        ({"kv_heads": 3}, "not a multiple of kv_heads=3"),
        ({"head_dim": 7}, "even head width"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Transformer(replace(ROPE, **fields))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"embed_tokens\.weight' is missing"):
        from_llama({}, ROPE)
    with pytest.raises(UserError, match="llama3"):
        llama_config({"rope_parameters": {"rope_type": "llama3"}})
