"""The Trajectory Transformer on a chain of two actions: its probabilities are those of the data, its plan the best."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.sequence import trajectory_transformer as tt
from foresight.training import offline
from tests.algorithms.sequence.chain import ENV, chain
from tests.algorithms.small_runs import last
from tests.sabotage import change, sabotaged_by

CONFIG = tt.Config(
    steps=250, data=("d",), gamma=1.0, bins=4, binning="uniform", window=2, context=1, horizon=1, beam_width=4,
    dim=16, layers=1, heads=1, dropout=0, lr_warmup=10, learning_rate=1e-2, weight_decay=0, top_p=0.99,
)  # fmt: skip


def _other_actions(tokens):
    return torch.cat([tokens[..., :1], tokens[..., 1:2].roll(4, 0), tokens[..., 2:]], -1)


@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.update", change("tokens", _other_actions))
@sabotaged_by("foresight.algorithms.sequence.trajectory_transformer.propose",
              lambda f: lambda *given: (lambda plans, score: (plans, -score))(*f(*given)))  # fmt: skip
def test_probabilities_are_those_of_the_data_and_the_plan_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards come after the second action: the sum of both in three of four episodes, 1 by luck in the fourth.

    After the action 0 the mean return is 5/8, after 1 it is 11/8.
    """
    data = chain()
    rows, _, real = data.window_rows(2 * torch.arange(16), 2)  # all episodes in each batch: no noise
    monkeypatch.setattr(offline, "read", lambda *_: data)
    monkeypatch.setattr(tt, "sample", lambda state: (state.tokens[rows], real.float()))
    state = last(tt, CONFIG, ENV)
    net, tokens = state.net.eval(), state.tokens[rows]
    with torch.no_grad():
        logits, value = net(tokens[..., :-1], real.float())
    reward = logits[:, 1, 1].softmax(-1)  # of the token after the second action
    zero, one, two = (net.bins.encode(torch.tensor([[float(x)]]), 2).item() for x in range(3))
    for episode, expected in ((0, (0.75, 0.25, 0.0)), (4, (0.0, 1.0, 0.0)), (12, (0.0, 0.25, 0.75))):
        found = reward[episode, [zero, one, two]].tolist()
        assert found == pytest.approx(list(expected), abs=0.05), episode
    assert logits[:, :, 0].softmax(-1)[..., :2].flatten().tolist() == pytest.approx([0.5] * 64, abs=0.05)
    means = net.bins.expected(value, 3)[[0, 12], 0].tolist()
    assert means == pytest.approx([5 / 8, 11 / 8], abs=0.06)
    with torch.no_grad():
        best = tt.plan(state, torch.zeros(1, 1, 3), torch.zeros(1, 1), torch.ones(1, 1))
    assert best.first.item() == 1
