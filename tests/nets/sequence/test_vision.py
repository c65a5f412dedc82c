"""ViT and Swin compared with transformers' models of the same weights, and what their attention promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence import swin, vit
from foresight.nets.sequence.attention import recorded
from foresight.nets.sequence.swin import Swin
from foresight.nets.sequence.vit import ViT
from tests.sabotage import change, sabotaged_by


def scrambled(module: nn.Module) -> Any:
    """`module` with large random weights: biases and positions must matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def load(target: nn.Module, weights: dict[str, Tensor]) -> Any:
    missing, unexpected = target.load_state_dict(weights, strict=False)
    assert not unexpected and not [name for name in missing if not name.startswith("pooler")], (missing, unexpected)
    return target.eval()


def block(ours: nn.Module, name: str) -> dict[str, Tensor]:
    """The weights of one of our blocks by transformers' names."""
    found = {}
    for kind in ("weight", "bias"):
        qkv = getattr(ours.attention.qkv, kind).chunk(3)
        found |= {f"{name}.attention.{x}_proj.{kind}": part for x, part in zip("qkv", qkv, strict=True)}
        found[f"{name}.attention.o_proj.{kind}"] = getattr(ours.attention.out, kind)
        found[f"{name}.mlp.fc1.{kind}"] = getattr(ours.mlp.up, kind)
        found[f"{name}.mlp.fc2.{kind}"] = getattr(ours.mlp.down, kind)
        found[f"{name}.layernorm_before.{kind}"] = getattr(ours.attention_norm, kind)
        found[f"{name}.layernorm_after.{kind}"] = getattr(ours.mlp_norm, kind)
    return found


@sabotaged_by("foresight.nets.sequence.vit.to_patches", change("images", lambda x: x.transpose(2, 3)))
@sabotaged_by("foresight.nets.sequence.attention.attend", change("allowed", torch.tril, "causal"))
def test_vit_is_the_one_of_transformers() -> None:
    from transformers import ViTConfig, ViTModel

    ours = scrambled(ViT((3, 8, 12), patch=4, dim=16, layers=2, heads=2))
    theirs = ViTModel(
        ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, layer_norm_eps=1e-6,
            image_size=(8, 12), patch_size=4,
        )
    )  # fmt: skip
    weights = {
        "embeddings.cls_token": ours.class_token,
        "embeddings.position_embeddings": ours.position,
        "embeddings.patch_embeddings.projection.weight": ours.embed.weight.view(16, 3, 4, 4),
        "embeddings.patch_embeddings.projection.bias": ours.embed.bias,
        "layernorm.weight": ours.norm.weight,
        "layernorm.bias": ours.norm.bias,
    }
    for i, layer in enumerate(ours.blocks):
        weights |= block(layer, f"layers.{i}")
    images = torch.rand(3, 3, 8, 12)
    with torch.no_grad():
        expected = load(theirs, weights)(images).last_hidden_state[:, 0]
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)


def unshifted(original: Any) -> Any:
    return lambda height, width, side, shift: original(height, width, side, 0)


def unmasked(original: Any) -> Any:
    def mutant(*args: Any) -> Any:
        tokens, allowed = original(*args)
        return tokens, torch.ones_like(allowed)

    return mutant


def transposed(original: Any) -> Any:
    return lambda side: original(side).T


@sabotaged_by("foresight.nets.sequence.swin.windows", unshifted, unmasked)
@sabotaged_by("foresight.nets.sequence.swin.relative_positions", transposed)
@pytest.mark.parametrize("size", [(32, 48), (36, 30)])  # windows that fit, and padding in both stages
def test_swin_is_the_one_of_transformers(size: tuple[int, int]) -> None:
    from transformers import SwinConfig, SwinModel

    ours = scrambled(Swin((3, *size), patch=2, dim=8, depths=(2, 2), heads=(2, 4), window=4))
    theirs = SwinModel(
        SwinConfig(image_size=size, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
    )
    weights = {
        "embeddings.patch_embeddings.projection.weight": ours.embed.weight.view(8, 3, 2, 2),
        "embeddings.patch_embeddings.projection.bias": ours.embed.bias,
        "embeddings.norm.weight": ours.embed_norm.weight,
        "embeddings.norm.bias": ours.embed_norm.bias,
        "encoder.layers.0.downsample.reduction.weight": ours.layers[2].reduction.weight,
        "encoder.layers.0.downsample.norm.weight": ours.layers[2].norm.weight,
        "encoder.layers.0.downsample.norm.bias": ours.layers[2].norm.bias,
        "layernorm.weight": ours.norm.weight,
        "layernorm.bias": ours.norm.bias,
    }
    for i, layer in enumerate(one for one in ours.layers if isinstance(one, swin.SwinBlock)):
        name = f"encoder.layers.{i // 2}.blocks.{i % 2}"
        weights |= block(layer, name)
        weights[f"{name}.attention.relative_position_bias.relative_position_bias_table"] = layer.attention.bias
    images = torch.rand(2, 3, *size)
    with torch.no_grad():
        expected = load(theirs, weights)(images).pooler_output
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)


def sharper(original: Any) -> Any:
    return lambda query, *rest: original(2 * query, *rest)


@sabotaged_by("foresight.nets.sequence.attention.attend_eager", sharper)
def test_the_weights_of_vit_are_those_of_the_fused_kernel() -> None:
    """Rows sum to 1, and the weights times V are the fused attention's output."""
    net = scrambled(ViT((1, 8, 8), patch=2, dim=16, layers=2, heads=2))
    images = torch.rand(3, 1, 8, 8)
    with recorded() as weights:
        features = net(images)
    assert [tuple(w.shape) for w in weights] == [(3, 2, 17, 17)] * 2
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(3, 2, 17))
    torch.testing.assert_close(features, net(images), rtol=1e-4, atol=1e-5)


@sabotaged_by("foresight.nets.sequence.attention.softmax", lambda f: lambda scores: f(2 * scores))
def test_the_weights_of_swin_are_those_of_the_fused_kernel() -> None:
    net = scrambled(Swin((3, 32, 32), patch=2, dim=8, window=4))
    images = torch.rand(2, 3, 32, 32)
    with recorded() as weights:
        features = net(images)
    assert [w.shape[1] for w in weights] == [16, 16, 4, 4]
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
    torch.testing.assert_close(features, net(images), rtol=1e-4, atol=1e-5)


def test_a_shifted_window_sees_only_neighbors() -> None:
    """On 4 × 4 tokens with windows of 2 shifted by 1: the last window holds the four corners, and each sees itself."""
    tokens, allowed = swin.windows(4, 4, 2, 1)
    assert tokens[0].tolist() == [5, 6, 9, 10] and allowed[0].all()
    assert tokens[3].tolist() == [15, 12, 3, 0] and torch.equal(allowed[3], torch.eye(4, dtype=torch.bool))
    assert tokens[1].tolist() == [7, 4, 11, 8] and allowed[1].sum() == 8


def test_without_positions_the_order_of_patches_is_unknown() -> None:
    images = torch.rand(4, 3, 8, 8)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    shuffled = vit.from_patches(vit.to_patches(images, 2)[:, order], (3, 8, 8), 2)
    assert torch.equal(vit.from_patches(vit.to_patches(images, 2), (3, 8, 8), 2), images)
    changes = []
    for positions in (False, True):
        net = scrambled(ViT((3, 8, 8), patch=2, dim=16, layers=2, positions=positions))
        changes.append((net(images) - net(shuffled)).abs().max().item())
    assert changes[0] < 1e-4 < 1e-1 < changes[1], changes


@pytest.mark.parametrize("kind", [ViT, Swin])
def test_sides_need_not_be_multiples_of_the_patch(kind: Any) -> None:
    net = kind((2, 13, 9), size=5, patch=4)
    images = torch.randint(0, 256, (3, 2, 2, 13, 9), dtype=torch.uint8)
    assert net(images).shape == (3, 2, 5) and net.size == 5
    torch.testing.assert_close(net(images), net(images.float() / 255))
    torch.testing.assert_close(net(images)[1, 1], net(images[1, 1]), rtol=1e-4, atol=1e-5)
    padded = vit.to_patches(torch.ones(1, 1, 13, 9), 4)
    assert padded.shape == (1, 12, 16) and padded.sum() == 13 * 9


def test_the_patch_sets_the_number_of_tokens() -> None:
    for patch, tokens in ((16, 16), (8, 64), (None, 64)):
        assert ViT((3, 64, 64), patch=patch).position.shape[1] == 1 + tokens
    ti = ViT((3, 224, 224), patch=16, dim=192, layers=12, heads=3)
    assert sum(p.numel() for p in ti.parameters()) == 5_524_416  # ViT-Ti/16 without its head
    assert math.prod(Swin((3, 64, 64)).grid) == 256


def test_mistakes_are_named() -> None:
    for kind in (ViT, Swin):
        with pytest.raises(UserError, match="patch must be from 1 to 8"):
            kind((3, 8, 8), patch=9)
        with pytest.raises(UserError, match="channels, height, width"):
            kind((8, 8))
    with pytest.raises(UserError, match="multiple of heads, 3"):
        ViT((3, 8, 8), heads=3)
    with pytest.raises(UserError, match="one number per stage"):
        Swin((3, 8, 8), depths=(2,))
    with pytest.raises(UserError, match="multiple of its heads"):
        Swin((3, 8, 8), heads=(3, 4))
    with pytest.raises(UserError, match="multiple of its heads"):
        Swin((3, 8, 8), heads=(0, 4))
