"""TD-MPC2's networks: simplices, one step after the other, random shifts, critics and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch.nn import functional

from foresight.data.sequences import Arrival, arrivals
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.nets.models.tdmpc2 import TDMPC2, LatentPolicy, QEnsemble, simnorm
from foresight.ops import transforms
from tests.nets.models import test_storm
from tests.sabotage import change, sabotaged_by, shift

BOX, IMAGE = gs.Box(-1, 1, (3,)), gs.Box(0, 255, (40, 44, 3), np.uint8)
STATES = gs.Dict({"b": gs.Box(-1, 1, (2,)), "a": gs.Box(-1, 1, (1,))})


def _model(space: gs.Space = BOX, episodic: bool = True) -> TDMPC2:
    torch.manual_seed(0)
    return TDMPC2(space, 2, 16, 12, 8, 2, 4, 11, 8, episodic)


def _batch(steps: int = 4) -> Trajectory:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ones = torch.ones(5, steps)
    discount = (draw(5, steps) > 0).float()
    return Trajectory(draw(5, steps, 3), draw(5, steps, 2).clamp(-1, 1), draw(5, steps), discount, 0 * ones, ones)


@sabotaged_by("foresight.nets.models.tdmpc2.simnorm", change("group", lambda g: 4))
def test_latents_are_on_simplices() -> None:
    x = torch.randn(7, 32)
    found = simnorm(x, 8)
    groups = found.view(7, 8, 4)  # a group is every fourth feature
    torch.testing.assert_close(groups.sum(1), torch.ones(7, 4))
    torch.testing.assert_close(groups, x.view(7, 8, 4).softmax(1))
    latent = _model().encoder(torch.randn(6, 3))
    torch.testing.assert_close(latent.view(6, 8, 2).sum(1), torch.ones(6, 2))


@pytest.mark.parametrize("space", [BOX, STATES, IMAGE], ids=["box", "dict", "pixels"])
def test_observations_become_latents(space: gs.Space) -> None:
    obs = {key: torch.randn(2, 5, *part.shape) for key, part in space.items()} if isinstance(space, gs.Dict) else (
        torch.randint(0, 255, (2, 5, *IMAGE.shape), dtype=torch.uint8) if space is IMAGE else torch.randn(2, 5, 3)
    )  # fmt: skip
    model = _model(space)
    found = model.observe(None, obs, torch.zeros(2, 5, 2), torch.zeros(2, 5), torch.Generator())["latent"]
    assert found.shape == (2, 5, 16)
    one = {key: x[1, 3:4] for key, x in obs.items()} if isinstance(obs, dict) else obs[1, 3:4]
    torch.testing.assert_close(model.encoder(one), found[1, 3:4])


@sabotaged_by("foresight.nets.models.tdmpc2.TDMPC2.step", change("action", torch.zeros_like))
@sabotaged_by(
    "foresight.nets.models.tdmpc2.TDMPC2.loss", change("batch", lambda b: b.replace(action=b.action.roll(1, 1)))
)
def test_the_loss_is_of_one_step_after_the_other() -> None:
    """Every row is predicted from the first observation and the actions; the first row has no loss."""
    model, batch = _model(), _batch()
    for part in model.parameters():  # heads that start at 0 would not see the action
        torch.nn.init.normal_(part, std=0.3)
    arrival = arrivals(batch)
    terms, states = model.loss(None, batch, arrival, torch.Generator())
    assert set(terms) == {"consistency", "reward", "termination"}
    latent = model.encoder(batch.obs[:, 0])
    for t in range(1, 4):
        before = latent
        latent, _, discount = model.step(before, batch.action[:, t - 1])
        truth = model.encoder(batch.obs[:, t])
        torch.testing.assert_close(terms["consistency"][:, t], (latent - truth).square().mean(-1))
        torch.testing.assert_close(states["latent"][:, t], latent)
        torch.testing.assert_close(states["target"][:, t], truth)
        share = torch.where(batch.discount[:, t - 1] == 0, 1 - discount, discount)
        torch.testing.assert_close(terms["termination"][:, t], -share.log(), atol=1e-5, rtol=1e-4)
    assert all(term.shape == (5, 4) and (term[:, 0] == 0).all() for term in terms.values())
    assert not states["target"].requires_grad and states["latent"].requires_grad


@sabotaged_by("foresight.nets.models.world_model.imagined", shift("reward"))
def test_imagination_is_steps_of_the_policy() -> None:
    model, policy = _model(), LatentPolicy(gs.Box(-1, 1, (2,)), 16, 12)
    for part in model.parameters():
        torch.nn.init.normal_(part, std=0.3)
    start = {"latent": model.encoder(torch.randn(6, 3))}
    steps, states = model.imagine(start, policy, 3, torch.Generator().manual_seed(0))
    for t in range(3):
        after, reward, discount = model.step(steps.obs[:, t], steps.action[:, t])
        torch.testing.assert_close(steps.reward[:, t], reward)
        torch.testing.assert_close(steps.discount[:, t], discount)
        torch.testing.assert_close(after, states[:, t + 1])


@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: Arrival(*(x.roll(1, 1) for x in f(batch))))
def test_it_learns_reward_and_termination_of_a_known_process() -> None:
    model, shown = _of_chain(arrivals), 2 * torch.eye(3) - 1
    with torch.no_grad():
        for state in range(3):
            _, reward, continuation = model.step(model.encoder(shown[state].expand(2, 3)), torch.eye(2))
            torch.testing.assert_close(reward, (1.0 - state) * torch.tensor([1.0, 2.0]), atol=0.15, rtol=0)
            torch.testing.assert_close(continuation, torch.full((2,), 0.5 if state == 2 else 1.0), atol=0.12, rtol=0)


@functools.cache
def _of_chain(arrivals: Callable[[Trajectory], Arrival]) -> TDMPC2:
    """A model of the chain; `arrivals` are an argument so that mutants of it have models of their own."""
    model, generator = _model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = test_storm.chain(384, 0).map(lambda x: x.view(64, 6, *x.shape[2:]))
    arrival = arrivals(batch)
    reached = functional.pad(arrival.known[:, 1:].cumprod(1), (1, 0))
    for step in range(150):
        terms, _ = model.loss(None, batch, arrival, generator)
        optimizer.zero_grad()
        sum((reached * term).mean() for term in terms.values()).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 112 else 2e-3
        optimizer.step()
    return model


def test_new_rewards_and_values_are_exactly_zero() -> None:
    model, critics = _model(), QEnsemble(16, 2, 12, 3, 11, 0.0)
    latent, action = model.encoder(torch.randn(6, 3)), torch.randn(6, 2)
    assert (model.step(latent, action)[1] == 0).all()
    assert all((q.mean() == 0).all() for q in critics(latent, action))
    assert (_model(episodic=False).step(latent, action)[2] == 1).all()


def test_two_of_the_critics_are_drawn() -> None:
    critics = QEnsemble(16, 2, 12, 4, 11, 0.0)
    for part in critics.parameters():
        torch.nn.init.normal_(part, std=0.3)
    latent, action, generator = torch.randn(6, 16), torch.randn(6, 2), torch.Generator().manual_seed(0)
    members = torch.stack([q.mean() for q in critics(latent, action)])
    pairs = set()
    for _ in range(60):
        found = critics.two(latent, action, generator)
        pairs.add(tuple(int((members - q).abs().amax(1).argmin()) for q in found))
    assert pairs == {(i, j) for i in range(4) for j in range(4) if i != j}


@sabotaged_by("foresight.nets.models.tdmpc2.QEnsemble._run", change("generator", lambda g: None))
def test_dropout_is_a_share_of_units_drawn_by_the_generator() -> None:
    critics = QEnsemble(16, 2, 64, 2, 11, 0.25)
    with torch.no_grad():
        for member in critics.members:
            torch.nn.init.normal_(member[-1].weight)
    latent, action = torch.randn(40, 16), torch.randn(40, 2)
    plain, *drawn = (
        critics(latent, action, g)[0].mean() for g in (None, *(torch.Generator().manual_seed(s) for s in (1, 1, 2)))
    )
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], plain)


@sabotaged_by("foresight.ops.transforms.random_shift", change("pad", lambda p: p - 1))
def test_random_shifts_repeat_the_edge() -> None:
    image = torch.arange(30, dtype=torch.uint8).view(1, 1, 5, 6).expand(500, 2, -1, -1)
    found = transforms.random_shift(image, 3, torch.Generator().manual_seed(0))
    assert found.shape == image.shape and found.dtype == torch.uint8
    padded = torch.nn.functional.pad(image[:1].float(), (3, 3, 3, 3), mode="replicate")[0, 0].to(torch.uint8)
    windows = {tuple(padded[y : y + 5, x : x + 6].flatten().tolist()) for y in range(7) for x in range(7)}
    same = {tuple(row.flatten().tolist()) for row in found[:, 0]} == windows
    assert same  # of a comparison, pytest would write out both sides: a minute, where it is to fail
    assert torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(transforms.random_shift(image, 0, torch.Generator()), image)


def test_images_are_shifted_in_training_only() -> None:
    model, obs = _model(IMAGE), torch.randint(0, 255, (3, 40, 44, 3), dtype=torch.uint8)
    assert torch.equal(model.encoder(obs), model.encoder(obs))
    assert not torch.equal(model.encoder(obs), model.encoder(obs, torch.Generator().manual_seed(0)))


@sabotaged_by("torch.nn.functional.group_norm", lambda f: lambda x, groups: x / 255 - 0.5)
@torch.no_grad()
def test_what_moves_before_a_white_floor_and_its_brightness_are_seen() -> None:
    encoder = _model(IMAGE).encoder
    bars = torch.full((6, 40, 44, 3), 255, dtype=torch.uint8)
    for i in range(6):
        bars[i, 15:25, 6 * i + 2 : 6 * i + 5] = 60
    assert encoder(bars).std(0).mean() > 0.05
    plain = torch.stack([torch.full((40, 44, 3), level, dtype=torch.uint8) for level in (20, 90, 250)])
    assert encoder(plain).std(0).mean() > 0.01


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"at least 39 x 39 pixels, not 36 x 36.*image_size=64"):
        _model(gs.Box(0, 255, (36, 36, 3), np.uint8))
    masked = gs.Dict({"obs": BOX, "action_mask": gs.MultiBinary(3)})
    for space, message in (
        (gs.Dict({"view": IMAGE, "speed": BOX}), "in a Dict, as view.*FilterObservation"),
        (gs.Box(0, 1, (40, 44, 3), np.float32), "one image .* or numbers in one dim, .*flatten"),
        (masked, "do not support an action_mask"),
    ):
        with pytest.raises(UserError, match=message):
            _model(space)
    with pytest.raises(UserError, match=r"continuous actions.*takes Discrete\(3\).*dreamer"):
        LatentPolicy(gs.Discrete(3), 16, 12)
    with pytest.raises(UserError, match=r"bounded actions"):
        LatentPolicy(gs.Box(-np.inf, np.inf, (2,)), 16, 12)
    with pytest.raises(UserError, match="has a dim with equal bounds, so there is nothing to choose: leave it out"):
        LatentPolicy(gs.Box(np.array([0, -1], np.float32), np.array([0, 1], np.float32)), 16, 12)
