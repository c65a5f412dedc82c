"""One model over several processes: FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et al. 2023, arXiv:2304.11277).

Each process holds a shard of every weight, gradient and optimizer moment; layers are all-gathered one at a time while
they compute. Every process sees the whole batch and trains on its share of the micro-batches (`training.microbatch`),
so the sum of the gradients is that of one process, whatever the number of processes. Without a process group every
function here does nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

Value = TypeVar("Value")
MicroLoss = Callable[[], tuple[Tensor, dict[str, Tensor]]]
"""Computes the loss of one micro-batch and sums for the metrics."""


def processes() -> int:
    """The number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The rank of this process, from 0."""
    return dist.get_rank() if processes() > 1 else 0


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true in any process: clocks and signals differ, but all must decide the same."""
    if processes() == 1:
        return flag
    joint = torch.tensor(float(flag), device=_device())
    dist.all_reduce(joint, dist.ReduceOp.MAX)
    return bool(joint)


def broadcast(value: Value) -> Value:
    """The value of rank 0, in all processes: for what a clock or user code decides."""
    if processes() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def on_first(call: Callable[[], Value]) -> Value:
    """The result of `call` in rank 0, in all processes: for user code. What it raises is raised in all of them.

    Where rank 0 alone raised, the others would wait for it for ever.
    """
    if processes() == 1:
        return call()
    found: tuple[Any, Exception | None] = (None, None)
    if rank() == 0:
        try:
            found = call(), None
        except Exception as error:
            found = None, _sendable(error)
    result, raised = broadcast(found)
    if raised is not None:
        raise raised
    return result  # type: ignore[no-any-return]


def _sendable(error: Exception) -> Exception:
    """The error or, if it cannot be pickled, a RuntimeError with its name and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error


def all_gather(value: Value) -> list[Value]:
    """The values of all processes, in all of them. Tensors should be on the CPU."""
    if processes() == 1:
        return [value]
    values: list[Any] = [None] * processes()
    dist.all_gather_object(values, value)
    return values


def shard(module: Any, layers: Iterable[nn.Module]) -> None:
    """Keep a shard of every weight of a transformers model in this process; make the optimizer after this.

    Every one of its `layers` is a unit that is gathered and freed again; embeddings, the last norm and the head are
    another one. A layer inside another one comes before it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(_device().type, (processes(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # A pass starts with the embeddings, not with the forward of the whole model: the root is gathered there.
    register_fsdp_forward_method(module, "get_input_embeddings")


def unsharded(module: Any) -> Any:
    """A plain, unsharded copy of a transformers model, with its adapters and dtypes. All processes must call it."""
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
    """The whole tensor of which this process holds a shard. All processes must call it."""
    # A DTensor has it, which is slow to import.
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def local(value: Tensor) -> Tensor:
    """The shard of a tensor that this process holds."""
    shard: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return shard


def version(module: nn.Module) -> list[float]:
    """Sums of the weights (of the local shards): they differ after an update.

    Tensor version counters would miss updates: a fused optimizer does not raise them.
    """
    return [local(weight.detach()).sum(dtype=torch.float64).item() for weight in module.parameters()]


def share(losses: Iterable[MicroLoss]) -> Iterable[MicroLoss]:
    """This process's micro-batches, equally many in all processes, since every layer is a collective operation.

    A process without one left computes the first once more with weight 0.
    """
    if processes() == 1:
        return losses
    every = list(losses)
    rounds = -(-len(every) // processes())
    indices = [turn * processes() + rank() for turn in range(rounds)]
    return [every[i] if i < len(every) else _idle(every[0]) for i in indices]


def backward(loss: Tensor) -> None:
    """Add the gradient of a share of the loss. FSDP averages over processes, and the sum is wanted."""
    (loss if processes() == 1 else processes() * loss).backward()


def all_reduce(values: dict[str, float]) -> dict[str, float]:
    """The sum of each value over all processes."""
    if processes() == 1:
        return values
    joint = torch.tensor(list(values.values()), dtype=torch.float64, device=_device())
    dist.all_reduce(joint)
    return dict(zip(values, joint.tolist(), strict=True))


def _idle(loss: MicroLoss) -> MicroLoss:
    def nothing() -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = loss()
        return 0 * value, {key: 0 * x for key, x in sums.items()}

    return nothing


def _plain(kind: type[Any]) -> type[Any]:
    """The class of a model without FSDP's mixin."""
    from torch.distributed.fsdp import FSDPModule

    return next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    if found is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
