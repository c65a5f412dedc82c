"""The Decision Transformer on a chain of two actions: its probabilities must be those of the data given the return."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.sequence import decision_transformer as dt
from foresight.data.episodes import Episodes
from foresight.training import offline
from tests.algorithms.sequence.chain import ENV, chain
from tests.algorithms.small_runs import last
from tests.sabotage import change, sabotaged_by

CONFIG = dt.Config(
    steps=250, data=("d",), context=2, batch_size=32, dim=16, layers=1, dropout=0, learning_rate=5e-3, lr_warmup=10,
    weight_decay=0, max_grad_norm=10,
)  # fmt: skip


@sabotaged_by("foresight.algorithms.sequence.decision_transformer.update",
              change("batch", lambda b: b._replace(to_go=b.to_go.roll(1, 0))))  # fmt: skip
@sabotaged_by("foresight.nets.sequence.decision.at_observations", lambda f: lambda x: x[:, 2::3])
def test_actions_have_the_probabilities_of_the_data_given_the_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of return 1 there are ten episodes: (0, 1) and (1, 0) four times each, (0, 0) and (1, 1) once each, by luck."""
    monkeypatch.setattr(offline, "read", lambda *_: chain())
    every = torch.arange(32)  # all windows in each batch: no noise
    monkeypatch.setattr(Episodes, "windows", lambda self, n, steps, generator: self.window(every, steps))
    net = last(dt, CONFIG, ENV).net.eval()
    for total, before, first, second in (
        (1.0, 0, 0.5, 0.8), (1.0, 1, 0.5, 0.2), (2.0, 1, 1.0, 1.0), (0.0, 0, 0.0, 0.0),
    ):  # fmt: skip
        action = net.actions.encode(torch.tensor([[before, 0]]))
        with torch.no_grad():
            y = net(torch.ones(1, 2, 1), action, torch.full((1, 2), total), torch.arange(2)[None], torch.ones(1, 2))
        found = y.softmax(-1)[0, :, 1].tolist()
        assert found == pytest.approx([first, second], abs=0.05), (total, before, found)
