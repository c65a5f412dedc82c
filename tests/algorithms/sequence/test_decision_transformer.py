"""The Decision Transformer as a program: what its tokens see, acting, resuming, and mistakes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.sequence import decision_transformer as dt
from foresight.algorithms.sequence import online_decision_transformer as odt
from foresight.errors import UserError
from foresight.nets.sequence import decision
from foresight.training import offline
from tests.algorithms.sequence.chain import ENV, SPACES, chain
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, stopped_and_whole, weights
from tests.sabotage import sabotaged_by

CONFIG = dt.Config(steps=60, data=("d",), context=2, batch_size=16, dim=8, layers=1, lr_warmup=10)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain as the data."""
    monkeypatch.setattr(offline, "read", lambda *_: chain())


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("net", "optimizer", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    before = torch.random.get_rng_state()
    stopped, whole = stopped_and_whole(dt, CONFIG, _env)
    resumed = last(dt, CONFIG, ENV, restored(dt, stopped, ENV))
    assert stopped.step == 50 and resumed.step == 60 and torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.net.scale, whole.net.scale) and whole.net.best == 2
    assert torch.equal(before, torch.random.get_rng_state())


def test_integers_that_do_not_start_at_0_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, which is 0, is none of them; what stands there changes nothing."""
    data = dataclasses.replace(chain(), obs=torch.full((48,), 2))
    monkeypatch.setattr(offline, "read", lambda *_: data)
    env = SimpleNamespace(spaces=SPACES._replace(obs=gs.Discrete(3, start=1)), num_envs=1)
    state = last(dt, dataclasses.replace(CONFIG, steps=2), env)
    _, extras, carry = dt.act(state, torch.tensor([2]))
    other = {**decision.empty_carry(state.net, torch.tensor([2]), 2), "obs": torch.full((1, 2), 3)}
    assert torch.equal(dt.act(state, torch.tensor([2]), other)[1]["output"], extras["output"])
    assert carry["obs"][0, -1] == 2


def _env() -> Any:
    return ENV


@sabotaged_by("foresight.nets.sequence.decision.at_observations", lambda f: lambda x: x[:, 2::3])
def test_an_action_is_predicted_before_it_is_seen() -> None:
    net = dt.build(CONFIG, SPACES).net.eval()
    torch.manual_seed(0)
    given = {"obs": torch.rand(1, 3, 1), "action": torch.rand(1, 3, 2), "to_go": torch.rand(1, 3)}
    rest = {"time": torch.arange(3)[None], "mask": torch.ones(1, 3)}
    base = net(**given, **rest)
    for name, same in (("obs", 1), ("to_go", 1), ("action", 2)):
        moved = {key: x.clone() for key, x in given.items()}
        moved[name][:, 1] += 1
        y = net(**moved, **rest)
        assert torch.equal(y[:, :same], base[:, :same]), name
        assert not torch.allclose(y[:, same], base[:, same], atol=1e-6), name


@sabotaged_by("foresight.algorithms.sequence.decision_transformer.rewarded", lambda f: lambda carry, reward: carry)
@sabotaged_by("foresight.algorithms.sequence.decision_transformer.reset_carry", lambda f: lambda carry, cut: carry)
def test_acting_reads_the_window_that_training_reads() -> None:
    """The outputs step by step equal those of whole windows, padded or not, with the same returns to go."""
    state = dt.build(dataclasses.replace(CONFIG, target_return=5.0), SPACES)
    obs, reward = torch.rand(2, 4, 1), torch.tensor([[1.0, 2, 0, 1], [0, 3, 1, 1]])
    carry, outputs, actions = None, [], []
    for t in range(4):
        action, extras, carry = dt.act(state, obs[:, t], carry)
        actions.append(action)
        outputs.append(extras["output"])
        carry = dt.rewarded(carry, reward[:, t])
        carry = dt.reset_carry(carry, torch.tensor([0.0, float(t == 1)]))  # the second row: two episodes
    action = state.net.actions.encode(torch.stack(actions, 1))
    for row, first in ((0, 0), (1, 2)):
        received = reward[row, first:].cumsum(0) - reward[row, first:]
        given = [x[None, 2:] for x in (obs[row], action[row])]
        to_go, time = 5 - received[-2:], torch.arange(4 - first)[-2:]
        expected = state.net(*given, to_go[None], time[None], torch.ones(1, 2))[0, -1]
        torch.testing.assert_close(outputs[3][row], expected)
    padded = state.net(obs[:1, [3, 0]], action[:1, [3, 0]], torch.tensor([[9.0, 5]]), torch.tensor([[7, 0]]),
                       torch.tensor([[0.0, 1]]))  # fmt: skip
    torch.testing.assert_close(outputs[0][0], padded[0, -1])


@sabotaged_by("foresight.nets.precision.dtype", lambda f: lambda *_: None)
@pytest.mark.parametrize("algorithm", [dt, odt])
def test_bfloat16_computes_the_transformer_alone(algorithm: Any) -> None:
    """Outputs stay float32 and near those of float32, and gradients reach every parameter."""
    batch = chain().windows(16, 2, torch.Generator().manual_seed(0))
    y = []
    for precision in ("float32", "bfloat16"):
        config = algorithm.Config(dim=8, layers=1, context=2, precision=precision)
        net = algorithm.build(config, SPACES).net.eval()
        y.append(net(batch.obs, net.actions.encode(batch.action), batch.to_go, batch.time, batch.mask))
    y[1].sum().backward()
    assert y[1].dtype == torch.float32 and all(x.grad is not None for x in net.parameters())
    assert 0 < (y[1] - y[0]).abs().max() < 0.05


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"target_return 9 is above the highest .* data, 2: .* Ask for at most 2\."):
        next(dt.train(dataclasses.replace(CONFIG, target_return=9.0), ENV))
    with pytest.raises(UserError, match="context must be at least 1"):
        last(dt, dataclasses.replace(CONFIG, context=0), ENV)
    silent = chain()
    silent.reward.zero_()
    monkeypatch.setattr(offline, "read", lambda *_: silent)
    with pytest.raises(UserError, match="have no rewards"):
        last(dt, CONFIG, ENV)
