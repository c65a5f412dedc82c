"""LeWorldModel on a line: its one-dimensional embedding must be the normal quantile of the place, its plans exact."""

from __future__ import annotations

import dataclasses

import torch

from foresight.algorithms.world import lewm
from tests.algorithms.world.line import LEWM, SPEED, draw, line
from tests.sabotage import change, sabotaged_by

CONFIG = dataclasses.replace(LEWM, dim=1, steps=500, batch_size=128, history=1, candidates=64, iterations=6)


@sabotaged_by("foresight.ops.latent.sigreg", change("z", lambda z: 2 * z))
@sabotaged_by("foresight.algorithms.world.lewm.update", change("action", lambda a: a.roll(1, 0)))
def test_the_embedding_is_the_normal_quantile_of_the_place_and_plans_lead_to_the_goal() -> None:
    """SIGReg is least where the embeddings are normal; of one dimension, one increasing map of the place makes them so.

    Up to its sign. The distribution of places is that of the data. With it known, prediction and plan can be exact.
    """
    for step, _, state in lewm.train(CONFIG, line()):
        if step == 300:
            _assert_quantiles_and_plans(state, 2.0)  # what is wrong then stays so
    _assert_quantiles_and_plans(state, 1.0)


@torch.no_grad()
def _assert_quantiles_and_plans(state: lewm.State, slack: float) -> None:
    """With tolerances that are `slack` times those of the end."""
    training = state.model.training
    model, data = state.model.eval(), lewm.gather(CONFIG, line(), state.model)
    grid = torch.linspace(0, 1, 1_001)
    drawn = draw(grid)[:, 0, :, 0].float()
    image = data.image[data.start[:, 0], data.start[:, 1]]
    place = grid[torch.cdist(image[:, 0, :, 0].float(), drawn).argmin(-1)].sort().values
    shown = torch.linspace(0.05, 0.95, 19)
    z = model.encoder(draw(shown))[:, 0]
    z = z * torch.sign(z[-1] - z[0])
    share = torch.searchsorted(place, shown).double() / len(place)
    exact = torch.special.ndtri(share).float()
    assert (z - exact).abs().max() < 0.35 * slack and (z - exact).abs().mean() < 0.15 * slack, z - exact

    blocks = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.5, -0.5]])
    start = torch.tensor([0.3, 0.7, 0.5])
    after = model.imagine(model.encoder(draw(start)), blocks.unsqueeze(1))
    there = model.encoder(draw(torch.tensor([0.5, 0.5, 0.5])))
    torch.testing.assert_close(after, there, atol=0.2 * slack, rtol=0)

    start, goal = torch.tensor([0.2, 0.8, 0.5, 0.6]), torch.tensor([0.5, 0.4, 0.8, 0.6])
    actions = lewm.plan(state, {"image": draw(start), "goal": draw(goal)})
    torch.testing.assert_close(start + SPEED * actions.sum((1, 2)), goal, atol=0.06 * slack, rtol=0)
    model.train(training)
