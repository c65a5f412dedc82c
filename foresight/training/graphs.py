"""Updates recorded as CUDA graphs: the thousands of kernels of an update start with one call.

A small kernel is over before Python has started the next one: such an update takes as long as Python, not as long as
its arithmetic. A graph holds the kernels of a whole update, imagination and optimizer included, with their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.data import trees

WARM = 3  # calls before the recording: optimizers allocate their state, libraries choose their kernels


class Graph:
    """A function of tensors, recorded at its call number `WARM` + 1 on a GPU and replayed at all later ones.

    The function reads and writes the same tensors at every call, apart from its inputs, whose shapes stay the same. It
    neither waits for the GPU nor copies from or to the CPU. Its results are overwritten by the next call. On a CPU, and
    with `enabled` false, every call runs it as it is.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._inputs: list[Tensor] = []
        self._result: Any = None

    def __call__(self, run: Callable[..., Any], inputs: Sequence[Any], generators: Sequence[torch.Generator]) -> Any:
        """`run(*inputs)`, which draws from `generators` and torch's own. `inputs` are trees of tensors on one device.

        All calls of one Graph are given the same `run`.
        """
        tensors = _tensors(inputs)
        if not self.enabled or tensors[0].device.type != "cuda":
            return run(*inputs)
        if self._graph is not None:
            torch._foreach_copy_(self._inputs, tensors)
            self._graph.replay()
            return self._result
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if self._calls < WARM:
            self._calls += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = run(*inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return result
        own = trees.merge(lambda leaves: leaves[0].clone(), [tuple(inputs)])
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=self._stream):
            self._result = run(*own)
        self._graph, self._inputs = graph, _tensors(own)
        graph.replay()  # recording does not run anything
        return self._result

    def __deepcopy__(self, memo: dict[int, object]) -> Graph:
        return Graph(self.enabled)  # the tensors of the copy are others


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree of dataclasses, dicts and tuples, in a fixed order."""
    found: list[Tensor] = []
    trees.merge(lambda leaves: found.append(leaves[0]), [tuple(tree)])
    return found
