"""Updates as CUDA graphs: the same values as without, from new inputs and new draws at every call."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from foresight.training import graphs, optim
from tests.sabotage import sabotaged_by


class Rows(NamedTuple):
    """Two inputs, in a tree."""

    x: Tensor
    more: dict[str, Tensor]


def _steps(device: str, enabled: bool, count: int) -> tuple[list[float], Tensor]:
    """The losses and the final weights of `count` steps of a noisy regression."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1).to(device)
    optimizer = optim.adam(net.parameters(), 0.1)
    generator = torch.Generator(device).manual_seed(1)
    graph = graphs.Graph(enabled)

    def update(rows: Rows) -> Tensor:
        noise = torch.rand(len(rows.x), generator=generator, device=device)
        loss = (net(rows.x).squeeze(-1) - rows.more["y"] - noise).square().mean()
        optim.step(optimizer, optim.total({"loss": loss}, {}).backward)
        return loss.detach()

    losses = []
    for i in range(count):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i)).to(device)
        losses.append(graph(update, [Rows(x, {"y": x.sum(-1)})], [generator]).item())
    return losses, net.weight.detach().cpu()


def test_on_a_cpu_a_graph_runs_the_function_as_it_is() -> None:
    losses, weight = _steps("cpu", True, 8)
    plain, other = _steps("cpu", False, 8)
    assert losses == plain and torch.equal(weight, other)
    assert len(set(losses)) == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@sabotaged_by("torch._foreach_copy_", lambda f: lambda *args: None)
def test_on_a_gpu_a_replayed_update_equals_the_plain_one() -> None:
    losses, weight = _steps("cuda", True, graphs.WARM + 8)
    plain, other = _steps("cuda", False, graphs.WARM + 8)
    torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_a_copy_records_its_own_graph() -> None:
    graph = graphs.Graph()
    graph._result = object()  # of tensors that the copy does not share
    assert copy.deepcopy(graph)._result is None


def test_tensors_of_a_tree_are_found_in_order() -> None:
    one, two, three = torch.zeros(1), torch.ones(2), torch.ones(3)
    found = graphs._tensors([Rows(one, {"a": two}), {"b": three}])
    assert [len(x) for x in found] == [1, 2, 3]
