"""LeWorldModel's networks: causality, AdaLN-zero, the roll-out of imagination, the encoder."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces as gs

from foresight.nets.models import lewm
from foresight.nets.models.lewm import LeWM
from tests.sabotage import change, sabotaged_by

ACTION = gs.Box(-2.0, 4.0, (2,))


def _model(history: int = 3) -> LeWM:
    torch.manual_seed(0)
    space = gs.Box(0, 255, (16, 16, 1), dtype="uint8")
    model = LeWM(space, ACTION, block=2, dim=5, history=history, depth=4, width=8, layers=2, heads=2, hidden=16)
    with torch.no_grad():  # AdaLN-zero would hide everything
        for p in model.predictor.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


@sabotaged_by(
    "foresight.nets.sequence.attention.attend",
    lambda f: (
        lambda q, k, v, allowed, dropout: f(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool), dropout)
    ),
)
@torch.no_grad()
def test_a_prediction_sees_neither_later_embeddings_nor_later_actions() -> None:
    predictor = _model().predictor
    z, action = torch.randn(4, 3, 5), torch.randn(4, 3, 4)
    whole = predictor(z, action)
    for t in (1, 2):
        torch.testing.assert_close(predictor(z[:, :t], action[:, :t]), whole[:, :t], atol=1e-5, rtol=0)
    for changed in ((z + torch.tensor([0.0, 0, 1]).view(1, 3, 1), action), (z, action.flip(0))):
        assert (predictor(*changed) - whole).abs().amax((0, 2))[2] > 1e-3
    earlier = predictor(z + torch.tensor([1.0, 0, 0]).view(1, 3, 1), action)
    assert (earlier - whole).abs().amax((0, 2)).min() > 1e-4  # but all earlier ones


def test_a_block_starts_as_the_identity_and_then_depends_on_the_condition() -> None:
    torch.manual_seed(0)
    config = lewm.TransformerConfig(dim=8, heads=2, activation="gelu", norm="layer")
    block, x, condition = lewm.Block(config), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert torch.equal(block(x, condition), x)
    (block(x, condition) - 1).square().mean().backward()
    assert block.modulation.weight.grad.abs().max() > 0
    with torch.no_grad():
        block.modulation.weight.normal_()
    assert not torch.allclose(block(x, condition), block(x, -condition))


@pytest.mark.parametrize("history", [1, 3])
@sabotaged_by("foresight.nets.models.lewm.LeWM.imagine", change("action", lambda a: a.flip(1)))
@sabotaged_by("foresight.nets.models.lewm.LeWM.imagine", change("z", lambda z: z.flip(0)))
@torch.no_grad()
def test_imagination_reads_its_own_predictions_within_the_history(history: int) -> None:
    model = _model(history)
    z, action = torch.randn(6, 5), torch.randn(6, 4, 4)
    past = [z]
    for t in range(4):
        window = slice(max(0, t + 1 - history), t + 1)
        past.append(model.predictor(torch.stack(past[window], 1), action[:, window])[:, -1].clone())
    torch.testing.assert_close(model.imagine(z, action), past[-1])
    one = model.predictor(z.unsqueeze(1), action[:, :1])[:, 0]
    torch.testing.assert_close(model.imagine(z, action[:, :1]), one)
    assert not torch.allclose(model.imagine(z, action[:, :1]), z, atol=1e-3)


@torch.no_grad()
def test_the_encoder_reads_images_in_any_order_and_size() -> None:
    for shape in ((3, 32, 32), (40, 30, 3), (2, 40, 40), (44, 40)):
        encoder = lewm.Encoder(gs.Box(0, 255, shape, dtype="uint8"), 4, 16, 5).eval()
        images = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
        z = encoder(images)
        assert z.shape == (2, 3, 5)
        torch.testing.assert_close(encoder(images[1])[2], z[1, 2], atol=1e-5, rtol=0)
    flat = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    torch.manual_seed(0)
    last = lewm.Encoder(gs.Box(0, 255, (32, 32, 3), dtype="uint8"), 4, 16, 5).eval()
    torch.manual_seed(0)
    first = lewm.Encoder(gs.Box(0, 255, (3, 32, 32), dtype="uint8"), 4, 16, 5).eval()
    torch.testing.assert_close(last(flat), first(flat.permute(0, 3, 1, 2)), atol=1e-5, rtol=0)


def test_actions_have_the_units_of_the_environment() -> None:
    assert _model().to_env(torch.tensor([[-1.0, 1.0]])).tolist() == [[-2.0, 4.0]]
