"""Images in patches, and reconstruction of some rows only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models import world_model
from foresight.nets.models.world_model import Images, TwoHotMLP
from tests.sabotage import change, returns, sabotaged_by, scaled

SPACE = gs.Box(0, 255, (32, 32, 3), np.uint8)


@sabotaged_by("foresight.nets.models.world_model.mlp", change("scale", lambda x: 1.0))
def test_a_new_two_hot_head_predicts_exactly_0() -> None:
    head = TwoHotMLP(5, 8, 1)
    for x in (torch.randn(7, 5), torch.randn(7, 5).requires_grad_()):
        assert not head(x).mean().any()


@sabotaged_by("torch.nn.functional.pixel_shuffle", lambda f: lambda x, n: f(x, n).transpose(-1, -2))
def test_a_decoder_draws_squares_of_the_patch_in_their_places() -> None:
    for patch in (2, 8):
        decoder = Images(SPACE, 2, patch).decoder(5)
        torch.nn.init.zeros_(decoder.squares.weight)
        square = torch.randn(3, patch, patch, generator=torch.Generator().manual_seed(0))
        decoder.squares.bias.data = square.flatten()
        drawn = decoder(torch.zeros(2, 5))
        wanted = square.sigmoid().repeat(1, 32 // patch, 32 // patch)
        torch.testing.assert_close(drawn, wanted.expand(2, -1, -1, -1))


@sabotaged_by(
    "foresight.nets.models.world_model.Images.planes", lambda f: lambda self, x: f(self, x) * (torch.arange(32) > 0)
)
def test_every_pixel_is_seen() -> None:
    for patch in (1, 4, 8):
        torch.manual_seed(0)
        model = Images(SPACE, 4, patch)
        images = torch.rand(2, 3, 32, 32, 3, requires_grad=True)
        features = model(images)
        assert features.shape == (2, 3, model.size)
        (gradient,) = torch.autograd.grad(features.square().sum(), images)
        assert (gradient.abs().amax((0, 1, 4)) > 0).all()


def _one_image(original):
    """Every image has the features of the first one."""
    return lambda self, images: original(self, images[:1]).expand(len(images), -1)


@sabotaged_by("foresight.nets.models.world_model.Images._encoded", _one_image)
@pytest.mark.parametrize("images", ["vit:8", "swin:4", "impala"])
def test_other_networks_encode_images(images: str) -> None:
    torch.manual_seed(0)
    model, seen = Images(SPACE, 2, 1, images), torch.randint(0, 256, (2, 3, 32, 32, 3), dtype=torch.uint8)
    network = encoders.image_encoder(SPACE, images)
    network.load_state_dict(model.network.state_dict())
    features = model(seen)
    assert features.shape == (2, 3, network.size) == (2, 3, model.size)
    torch.testing.assert_close(features, network(seen))
    assert model.decoder(5)(torch.zeros(2, 5)).shape == (2, 3, 32, 32)


@sabotaged_by("foresight.nets.models.world_model.reconstruction", scaled(0.5), change("rows", lambda rows: 0))
def test_the_rows_that_are_decoded_weigh_as_much_as_all() -> None:
    torch.manual_seed(0)
    model = Images(SPACE, 2)
    decoder = model.decoder(5)
    features, obs = torch.randn(2, 3, 5), torch.randint(256, (2, 3, 32, 32, 3), dtype=torch.uint8)
    full = model.loss(decoder(features), obs)
    seen: set[int] = set()
    for seed in range(12):
        found = world_model.reconstruction(
            model, decoder, features, obs, rows=1, generator=torch.Generator().manual_seed(seed)
        )
        drawn = found.sum(0).nonzero().flatten().tolist()
        assert len(drawn) == 1
        torch.testing.assert_close(found[:, drawn[0]], 3 * full[:, drawn[0]])
        seen |= set(drawn)
    assert seen == {0, 1, 2}


def test_rows_beyond_the_sequence_are_all_of_them() -> None:
    model = Images(SPACE, 2)
    decoder, generator = model.decoder(5), torch.Generator()
    features, obs = torch.randn(1, 3, 5), torch.zeros(1, 3, 32, 32, 3, dtype=torch.uint8)
    for rows in (0, 3, 4):
        found = world_model.reconstruction(model, decoder, features, obs, rows, generator)
        torch.testing.assert_close(found, model.loss(decoder(features), obs))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"patch 16 does not fit images of 32 pixels. Use one of 1, 2, 4, 8\."):
        Images(SPACE, 2, 16)
    with pytest.raises(UserError, match="Did you mean 'convs'"):
        Images(SPACE, 2, 1, "conv")


def test_without_gradient_few_images_at_a_time_give_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, images = Images(SPACE, 4), torch.randint(256, (2, 5, 32, 32, 3), dtype=torch.uint8)
    expected = model(images)
    assert expected.requires_grad
    sizes, encoded = [], Images._encoded
    monkeypatch.setattr(Images, "_encoded", lambda self, x: sizes.append(len(x)) or encoded(self, x))
    monkeypatch.setattr(world_model, "AT_ONCE", 4)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected)
    assert sizes == [4, 4, 2]


@sabotaged_by("foresight.nets.models.world_model.in_parts", scaled(1.01))
@sabotaged_by("foresight.nets.models.world_model.checkpoint", returns(lambda x: x.detach().lerp(x, 0.5)))
@pytest.mark.parametrize("patch", [1, 8])
def test_recomputed_images_have_the_same_values_and_gradients(patch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_model, "AT_ONCE", 4)  # the last part is smaller
    torch.manual_seed(0)
    encoder = Images(SPACE, 2, patch)
    model = torch.nn.ModuleList([encoder, encoder.decoder(encoder.size)])
    images = torch.randint(0, 256, (2, 5, 32, 32, 3), dtype=torch.uint8)
    found = []
    for _ in range(2):
        features = encoder(images)
        drawn = model[1](features)
        model.zero_grad()
        encoder.loss(drawn, images).mean().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append([features.detach(), drawn.detach(), *grads])
        world_model.recompute(model)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r"gradient_checkpointing .* these observations are numbers"):
        world_model.recompute(world_model.Vectors(gs.Box(-1, 1, (3,)), 4, 1))


@sabotaged_by("foresight.nets.models.world_model.Logits.forward", lambda f: torch.nn.Linear.forward)
@sabotaged_by("foresight.nets.models.world_model.RMSNorm.forward", lambda f: torch.nn.RMSNorm.forward)
def test_norms_and_outputs_are_float32_where_products_are_not() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        hidden = world_model.Dense(4, 8)(x)
        outputs = [world_model.TwoHotMLP(4, 8, 1)(x).choice.logits, world_model.mlp(4, 8, 1, 2)(x)]
        assert world_model.linear(4, 8)(x).dtype == torch.bfloat16
    assert all(y.dtype == torch.float32 for y in (hidden, *outputs))
