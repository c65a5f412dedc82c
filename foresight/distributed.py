"""One model over several processes: FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et al. 2023, arXiv:2304.11277).

Each process holds its part of every weight, gradient and moment, and layers are put together one at a time while they
compute. Every process sees the whole batch and learns from its share of the parts (`training.microbatch`), so that the
sum of their gradients is that of one process, whatever the number of processes. Without a process group all of this is
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

Piece = Callable[[], tuple[Tensor, dict[str, Tensor]]]


def processes() -> int:
    """How many processes learn together; 1 where there is no process group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return distributed.get_rank() if processes() > 1 else 0


def agreed(flag: bool) -> bool:
    """Whether `flag` is true in any process: what clocks and signals say must be the same in all."""
    if processes() == 1:
        return flag
    told = torch.tensor(float(flag), device=_device())
    distributed.all_reduce(told, distributed.ReduceOp.MAX)
    return bool(told)


def told(value: Any) -> Any:
    """What the first process has, in all of them: they must not differ in what a clock or somebody's code decides."""
    if processes() == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, 0)
    return box[0]


def gathered(value: Any) -> list[Any]:
    """What each process has, in all of them. Tensors should be on the CPU."""
    if processes() == 1:
        return [value]
    found = [None] * processes()
    distributed.all_gather_object(found, value)
    return found


def shard(module: Any) -> None:
    """Leave a part of every weight of a transformers model in this process; the optimizer is made after this.

    Every layer is a unit that is gathered and let go again; embeddings, the last norm and the head are another one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(_device().type, (processes(),))
    for layer in getattr(module, module.base_model_prefix).layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # A pass begins with the embeddings, not with the forward pass of the whole: it is where the root is gathered.
    register_fsdp_forward_method(module, "get_input_embeddings")


def whole(module: Any) -> Any:
    """A plain copy of a transformers model that `shard` split, adapters and number types too.

    All processes have to call it, and all get it.
    """
    state = {name: full(value) for name, value in module.state_dict().items()}
    with torch.random.fork_rng():
        copy = _plain(type(module))(module.config)
        for name, adapter in getattr(module, "peft_config", {}).items():
            copy.add_adapter(adapter, name)
    copy.load_state_dict(state)
    for name, weight in copy.named_parameters():
        weight.data = weight.data.to(state[name].dtype)
    copy.generation_config = getattr(module, "generation_config", None)
    return copy.to(_device()).eval()


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` split it."""
    return processes() > 1 and hasattr(module, "unshard")


def full(value: Tensor) -> Tensor:
    """The whole of a tensor of which this process has a part. All processes have to call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor, whose import takes its time


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return value.to_local() if hasattr(value, "to_local") else value


def version(module: nn.Module) -> list[float]:
    """Sums of the weights (of their parts in this process): others after an update.

    A fused optimizer changes weights without telling autograd, so the weights themselves are asked.
    """
    return [local(weight.detach()).sum(dtype=torch.float64).item() for weight in module.parameters()]


def share(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """This process's share of the pieces of a loss, as many in all processes: layers are gathered by all together.

    A process for which none is left computes the first one for nothing.
    """
    if processes() == 1:
        return pieces
    known = list(pieces)
    rounds = -(-len(known) // processes())
    places = [turn * processes() + rank() for turn in range(rounds)]
    return [known[place] if place < len(known) else _idle(known[0]) for place in places]


def backward(loss: Tensor) -> None:
    """Add the gradient of a share of the loss. FSDP means over processes, and what is wanted is the sum."""
    (loss if processes() == 1 else processes() * loss).backward()  # type: ignore[no-untyped-call]


def summed(numbers: dict[str, float]) -> dict[str, float]:
    """The sum over all processes of numbers that each of them has."""
    if processes() == 1:
        return numbers
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=_device())
    distributed.all_reduce(values)
    return dict(zip(numbers, values.tolist(), strict=True))


def _idle(piece: Piece) -> Piece:
    def nothing() -> tuple[Tensor, dict[str, Tensor]]:
        value, numbers = piece()
        return 0 * value, {key: 0 * number for key, number in numbers.items()}

    return nothing


def _plain(kind: type) -> Any:
    """The class of a model before FSDP put its own before it."""
    from torch.distributed.fsdp import FSDPModule

    return next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    if found is None or distributed.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
