"""Imitation with known solutions: the noise of two modes, the odds of demonstrations, and the entropy that is kept."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.imitation import diffusion_policy as dp
from foresight.algorithms.imitation import vla
from foresight.algorithms.sequence import online_decision_transformer as odt
from foresight.data import episodes
from foresight.training import offline
from tests.algorithms.imitation.lines import TWO_MODES, two_modes
from tests.algorithms.imitation.scenes import FIELDS, Pointing, demonstrations, scene
from tests.algorithms.sequence.chain import ENV
from tests.algorithms.small_runs import last
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.ops.generative.diffusion.add_noise", change("alpha_bar", lambda x: x * 0.5))
def test_the_noise_of_two_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are -1 or 1 throughout, equally often: E[A | x] = tanh(√ᾱ Σ_t x_t / (1 - ᾱ)), and the noise with it."""
    monkeypatch.setattr(offline, "read", lambda *_: two_modes())
    config = dp.Config(
        steps=200, data=("d",), obs_steps=1, horizon=4, action_steps=4, widths=(16,), groups=4, kernel=3, embedding=16,
        batch_size=128, diffusion_steps=20, denoising_steps=20, lr_warmup=5, learning_rate=1e-2, max_grad_norm=10,
    )  # fmt: skip
    env = SimpleNamespace(spaces=TWO_MODES)
    trained, untrained = last(dp, config, env).average.eval(), dp.build(config, TWO_MODES).average.eval()
    generator = torch.Generator().manual_seed(1)
    level = torch.randint(1, 21, (1_000,), generator=generator)
    mode = torch.randint(0, 2, (1_000, 1, 1), generator=generator) * 2.0 - 1
    share = trained.alpha_bar[level].view(-1, 1, 1)
    x = share.sqrt() * mode + (1 - share).sqrt() * torch.randn(1_000, 4, 1, generator=generator)
    mean = torch.tanh(share.sqrt() * x.sum(1, keepdim=True) / (1 - share))
    exact = (x - share.sqrt() * mean) / (1 - share).sqrt()
    errors = []
    for policy in (trained, untrained):
        with torch.no_grad():
            found = policy.net(x, level, policy.condition(torch.zeros(1_000, 1, 1)))
        errors.append((found - exact).square().mean().sqrt().item())
    assert errors[1] > 0.8 and errors[0] < 0.25, errors


@sabotaged_by("foresight.nets.sequence.vla.VLA.output", change("features", lambda x: x._replace(actions=x.actions * 0)))
def test_actions_have_the_odds_of_the_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scene is shown four times, and once with the wrong action: π(right) = 3/4, and nothing for the third."""
    right = demonstrations(128)
    wrong = dataclasses.replace(right, action=1 - right.action)
    monkeypatch.setattr(offline, "read", lambda *_: episodes.join([right, right, right, wrong]))
    config = vla.Config(steps=170, data=("d",), batch_size=64, learning_rate=1e-2, lr_warmup=5, **FIELDS)
    obs, action = scene(torch.Generator().manual_seed(9), 200)
    policy = last(vla, config, Pointing()).policy.eval()
    with torch.no_grad():
        odds = policy(obs).mean().squeeze(-2)
    assert odds.gather(1, action[:, None]).mean().item() == pytest.approx(0.75, abs=0.05)
    assert odds[:, 2].max() < 0.05


@sabotaged_by("foresight.ops.policy.temperature_loss", lambda f: lambda *given: -f(*given))
def test_a_policy_on_certain_actions_keeps_the_entropy_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The return tells the action, so likelihood alone gives entropy 0: the constraint is met with equality."""
    parts = []
    for action in (0, 1):
        step = (torch.ones(1), torch.tensor(action), torch.tensor(float(action)))
        parts.append(episodes.episode([step], torch.ones(1), True))
    monkeypatch.setattr(offline, "read", lambda *_: episodes.join(parts * 4))
    config = odt.Config(
        steps=400, pretrain_steps=400, data=("d",), num_envs=1, context=1, batch_size=32, dim=8, layers=1, dropout=0,
        lr_warmup=10, learning_rate=3e-3, weight_decay=0, alpha_learning_rate=2e-2, target_entropy=0.3,
    )  # fmt: skip
    state = last(odt, config, ENV)
    share = 0.0889  # of the other action: -p log p - (1 - p) log (1 - p) = 0.3
    assert -share * math.log(share) - (1 - share) * math.log(1 - share) == pytest.approx(0.3, abs=1e-3)
    zeros = torch.zeros(2, 1)
    with torch.no_grad():
        y = state.net.eval()(
            torch.ones(2, 1, 1), torch.zeros(2, 1, 2), torch.tensor([[0.0], [1.0]]), zeros.long(), zeros + 1
        )
    wrong = y.softmax(-1)[[0, 1], 0, [1, 0]]
    assert wrong.mean().item() == pytest.approx(share, abs=0.03)
