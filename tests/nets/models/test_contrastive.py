"""TWISTER's loss: a literal version, episodes, and crops of images."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces as gs

from foresight.nets.models.contrastive import Contrastive
from foresight.nets.models.world_model import Images
from tests.sabotage import change, sabotaged_by


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    deter, action, stoch = (torch.randn(2, 4, n, generator=generator) for n in (5, 2, 6))
    cut = torch.zeros(2, 4)
    cut[0, 1] = 1
    known = torch.tensor([[0.0, 1, 0, 1], [0, 1, 1, 1]])
    return deter, action, stoch, cut, known


@sabotaged_by("foresight.nets.models.contrastive.Contrastive.forward", change("cut", torch.zeros_like))
@torch.no_grad()
def test_it_is_the_cross_entropy_of_the_definition() -> None:
    torch.manual_seed(0)
    net = Contrastive(5, 6, 2, steps=3, units=8)
    deter, action, stoch, cut, known = _inputs()
    found = net(deter, action, stoch, cut, known)
    weights = [0.75**k for k in range(3)]
    for b in range(2):
        for t in range(4):
            total = 0.0
            for k in range(3):
                if not known[b, t] or t + k > 3 or cut[b, t : t + k].any():
                    continue
                query = net.queries[k](torch.cat([deter[b, t], *(action[b, t + j] for j in range(k))]))
                scores = {(i, j): float(query @ net.keys[k](stoch[i, j])) for i in range(2) for j in range(k, 4)}
                total += weights[k] * (math.log(sum(map(math.exp, scores.values()))) - scores[b, t + k])
            assert math.isclose(float(found[b, t]), total / sum(weights), abs_tol=1e-5)


def test_crops_keep_the_layout_and_show_a_part() -> None:
    ramp = torch.arange(32).repeat(32, 1)
    for shape in ((3, 32, 32), (32, 32, 3)):
        image = torch.stack([ramp, ramp.T, 0 * ramp], 0 if shape[0] == 3 else -1).to(torch.uint8).expand(5, 2, *shape)
        model = Images(gs.Box(0, 255, shape, np.uint8), 2)
        crop = model.augmented(image, torch.Generator().manual_seed(0))
        assert crop.shape == image.shape and crop.dtype == torch.float32
        x = 255 * model.planes(crop)
        assert (
            (x[:, 2] == 0).all() and (x[:, 0].diff(dim=2) >= -1e-4).all() and (x[:, 0].diff(dim=1).abs() < 1e-4).all()
        )
        span = x[:, 0].amax((1, 2)) - x[:, 0].amin((1, 2))
        assert (span < 31.01).all() and (span > 14.5).all() and span.std() > 0.5
