"""Encodes a State as JSON and tensors, and decodes it into a State that `build` made. No file can run code.

JSON scalars and lists are themselves; everything else is an object with one key that names its type:
`{"tensor": [file, name]}`, `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"module": ...}` and so on.
"""

from __future__ import annotations

import base64
import collections
import copy
import dataclasses
import importlib
import math
import random
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from foresight import distributed
from foresight.data.sequences import Chunk
from foresight.errors import UserError
from foresight.runtime import legacy
from foresight.runtime.checkpoints import chunks
from foresight.runtime.checkpoints.shards import NAMES, Reader

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Node = Any  # what JSON holds: the form of a value, see `Encoder`
Generator = torch.Generator | np.random.Generator | random.Random


class MismatchError(ValueError):
    """A checkpoint does not match the State that it is restored into; the message names the field."""


def saved_fields(value: DataclassInstance) -> Iterator[dataclasses.Field[Any]]:
    """The fields of a dataclass that a checkpoint holds: all but `config` and those with metadata `{"save": False}`."""
    for field in dataclasses.fields(value):
        if field.name != "config" and field.metadata.get("save", True):
            yield field


def without_moments(optimizer: Node) -> Node:
    """The encoded state of an optimizer of torch, with its groups only, as before its first step."""
    empty = {"dict": [[name, {"dict": []} if name == "state" else part] for name, part in optimizer["object"]["dict"]]}
    return {"object": empty}


class Encoder:
    """Turns values into JSON. The tensors in them are collected in `tensors`, to be written to `file`.

    A tensor that occurs again, in the same or in another file (tied weights), is stored once and referred to. A chunk
    of a replay is written to a file of its own in the folder `replay`, unless it is there; `chunks` are the sizes of
    all such files by their sha256. Unless `keep`, tensors are dropped: this process only helps to gather the sharded.
    """

    def __init__(self, replay: Path, keep: bool = True) -> None:
        self._replay, self._keep = replay, keep
        self.chunks: dict[str, int] = {}
        self.file = ""
        self.tensors: list[tuple[str, Tensor]] = []
        self._names: set[str] = set()
        # The weak reference prevents that another storage gets the address of a freed one.
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, list[str]]] = {}

    def begin(self, file: str) -> None:
        """Start a new `file`: tensors from here on belong to it, and earlier ones are released."""
        self.file, self.tensors, self._names = file, [], set()

    def __call__(self, value: Any, path: str) -> Node:
        """Encode `value`, which is at `path` in the State. Raises TypeError for what cannot be saved."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        if isinstance(value, torch.Generator):
            return {"torch.Generator": [value.device.type, self(value.get_state(), path)]}
        if isinstance(value, np.random.Generator):
            return {"numpy.Generator": self(value.bit_generator.state, path)}
        if isinstance(value, random.Random):
            return {"random.Random": self(value.getstate(), path)}
        if isinstance(value, nn.Module):
            return {"module": self._pairs(value.state_dict(), path)}
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return {"object": self(value.state_dict(), path)}
        if kind is Chunk:
            chunks.write(self._replay, value)
            self.chunks[value.file["sha256"]] = value.file["size"]
            return {"chunk": [value.stream, value.first, value.last, value.file]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self(getattr(value, f.name), f"{path}.{f.name}") for f in saved_fields(value)}
            return {"dataclass": [_address(kind), fields]}
        if isinstance(value, list):
            return [self(part, f"{path}.{i}") for i, part in enumerate(value)]
        if isinstance(value, tuple):
            parts = [self(part, f"{path}.{i}") for i, part in enumerate(value)]
            return {"namedtuple": [_address(kind), parts]} if hasattr(kind, "_fields") else {"tuple": parts}
        if isinstance(value, collections.deque):
            return {"deque": [value.maxlen, [self(part, f"{path}.{i}") for i, part in enumerate(value)]]}
        if isinstance(value, dict):
            return {"dict": self._pairs(value, path)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        raise TypeError(
            f"State.{path} is a {kind.__name__}, which a checkpoint cannot hold. Give it state_dict() and "
            'load_state_dict(), or, if build() makes it again, declare it with field(metadata={"save": False}).'
        )

    def _pairs(self, items: Mapping[Any, object], path: str) -> list[list[Any]]:
        return [[self(key, path), self(part, f"{path}.{key}")] for key, part in items.items()]

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"State.{path} is a {value.layout} tensor: a checkpoint can only hold its dense parts.")
        node: dict[str, Any] = {"tensor": self._store(value, path)}
        if value.dtype == torch.complex128:
            node["complex"] = True
        if value.device.type != "cpu":
            node["device"] = value.device.type
        if value.requires_grad and value.is_leaf:
            node["grad"] = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return node

    def _store(self, value: Tensor, path: str) -> list[str]:
        part = value.detach()
        value = distributed.full(part)
        if not self._keep:
            return [self.file, path]
        if value is not part:
            value = value.cpu()  # at once: the device has room for the shards alone
        if value.dtype == torch.complex128:
            value = torch.view_as_real(value)  # safetensors has no complex128
        if value.dtype not in NAMES:
            raise TypeError(f"State.{path} has dtype {value.dtype}, which safetensors cannot hold.")
        storage = value.untyped_storage()
        lazy = value.is_neg(), value.is_conj()
        key = (storage._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype, *lazy)
        if key in self._seen and value.numel():
            return self._seen[key][1]
        name, number = path, 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        self.tensors.append((name, value))
        self._seen[key] = StorageWeakRef(storage), [self.file, name]
        return [self.file, name]

    def _numpy(self, value: np.ndarray | np.generic, path: str) -> dict[str, Any]:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.kind not in "biufc" or not array.dtype.isnative:
            raise TypeError(f"State.{path} is a numpy array of {array.dtype}, which a checkpoint cannot hold.")
        if array.dtype.kind == "c":
            raise TypeError(f"State.{path} is a complex numpy array; use a torch tensor.")
        contiguous = np.require(array, requirements=["C", "W"])
        kind = "numpy" if isinstance(value, np.ndarray) else "numpy.scalar"
        return {kind: self._store(torch.from_numpy(contiguous), path)}


class Decoder:
    """Turns the JSON of `Encoder` back into values, in the `template` that `build` made if there is one.

    Modules, optimizers, generators and parameters are filled in place, because other objects refer to them;
    everything else is replaced. Tensors from an accelerator go to `device` if there is no template.
    """

    def __init__(self, reader: Reader, device: str | torch.device = "cpu") -> None:
        self._reader, self._device = reader, device
        self._shared: dict[tuple[str, str], Tensor] = {}

    def __call__(self, node: Node, template: object, path: str) -> Any:
        """Decode `node` at `path`. Raises MismatchError if it does not match the template."""
        if isinstance(node, list):
            old = template if isinstance(template, list) and len(template) == len(node) else [None] * len(node)
            return [self(part, t, f"{path}.{i}") for i, (part, t) in enumerate(zip(node, old, strict=True))]
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        method = getattr(self, "_of_" + kind.replace(".", "_").lower(), None)
        if method is None:
            raise MismatchError(f"{path} is of kind '{kind}', which this version does not know")
        return method(node, template, path)

    def _of_float(self, node: Node, template: object, path: str) -> float:
        return float(node["float"])

    def _of_bytes(self, node: Node, template: object, path: str) -> bytes:
        return base64.b64decode(node["bytes"])

    def _of_dtype(self, node: Node, template: object, path: str) -> torch.dtype:
        return getattr(torch, node["dtype"])

    def _of_device(self, node: Node, template: object, path: str) -> torch.device:
        return template if isinstance(template, torch.device) else torch.device(node["device"])

    def _of_tensor(self, node: Node, template: object, path: str) -> Tensor:
        file, name = node["tensor"]
        if isinstance(template, Tensor) and template.requires_grad and template.is_leaf:
            if list(template.shape) != self._reader.shape(file, name):
                raise MismatchError(f"{path} has shape {self._reader.shape(file, name)}, not {list(template.shape)}")
            self._reader.read_into(file, name, template)
            return template
        if (file, name) in self._shared:  # two fields that were one tensor are one tensor again
            return self._shared[file, name]
        value = self._reader.read(file, name)
        if node.get("complex"):
            value = torch.view_as_complex(value)
        if isinstance(template, Tensor):
            value = value.to(template.device)
        elif "device" in node:
            value = value.to(self._device)
        if "grad" in node:
            value = nn.Parameter(value) if node["grad"] == "parameter" else value.requires_grad_()
        self._shared[file, name] = value
        return value

    def _of_numpy(self, node: Node, template: object, path: str) -> np.ndarray:
        return self._reader.read(*node["numpy"]).numpy()

    def _of_numpy_scalar(self, node: Node, template: object, path: str) -> Any:
        return self._reader.read(*node["numpy.scalar"]).numpy()[()]

    def _of_torch_generator(self, node: Node, template: object, path: str) -> torch.Generator:
        device, state = node["torch.Generator"]
        generator = template if isinstance(template, torch.Generator) else torch.Generator(device)
        bits = self._reader.read(*state["tensor"])
        if generator.device.type == device:
            generator.set_state(bits)
        else:  # another kind of device has a different random stream: only a seed can be carried over
            generator.manual_seed(int(bits.to(torch.int64).sum()))
        return generator

    def _of_numpy_generator(self, node: Node, template: object, path: str) -> np.random.Generator:
        state = self(node["numpy.Generator"], None, path)
        name = state["bit_generator"]
        generator = template if isinstance(template, np.random.Generator) else None
        if generator is None or type(generator.bit_generator).__name__ != name:
            if name not in BIT_GENERATORS:
                raise MismatchError(f"{path} is a numpy generator of the unknown kind {name}")
            generator = np.random.Generator(getattr(np.random, name)())
        generator.bit_generator.state = state
        return generator

    def _of_random_random(self, node: Node, template: object, path: str) -> random.Random:
        generator = template if isinstance(template, random.Random) else random.Random()
        generator.setstate(self(node["random.Random"], None, path))
        return generator

    def _of_tuple(self, node: Node, template: object, path: str) -> tuple[Any, ...]:
        parts = node["tuple"]
        old = template if isinstance(template, tuple) and len(template) == len(parts) else (None,) * len(parts)
        return tuple(self(part, t, f"{path}.{i}") for i, (part, t) in enumerate(zip(parts, old, strict=True)))

    def _of_namedtuple(self, node: Node, template: object, path: str) -> Any:
        address, parts = node["namedtuple"]
        address = legacy.address(address)
        kind = type(template) if _address(type(template)) == address else _find(address, path)
        return kind(*self._of_tuple({"tuple": parts}, template, path))

    def _of_chunk(self, node: Node, template: object, path: str) -> Chunk:
        stream, first, last, file = node["chunk"]
        return Chunk(stream, first, last, file, lambda: self._reader.read_all(chunks.relative(file["sha256"])))

    def _of_deque(self, node: Node, template: object, path: str) -> Any:
        length, parts = node["deque"]
        return collections.deque((self(part, None, path) for part in parts), maxlen=length)

    def _of_dict(self, node: Node, template: object, path: str) -> dict[Any, Any]:
        old = template if isinstance(template, dict) else {}
        values = {}
        for key, part in node["dict"]:
            name = self(key, None, path)
            values[name] = self(part, old.get(name), f"{path}.{name}")
        if isinstance(template, dict) and type(template) is not dict:  # a defaultdict keeps its type
            template.clear()
            template.update(values)
            return template
        return values

    def _of_dataclass(self, node: Node, template: Any, path: str) -> Any:
        address, nodes = node["dataclass"]
        address = legacy.address(address)
        if dataclasses.is_dataclass(template) and _address(type(template)) == address:
            # Only frozen ones are copied: other references to the template must see the change.
            frozen = type(template).__dataclass_params__.frozen  # type: ignore[union-attr]  # of all dataclasses
            new: Any = copy.copy(template) if frozen else template
        else:
            kind = _find(address, path)
            new = kind.__new__(kind)
        self.fields(nodes, new, path)
        return new

    def fields(
        self, nodes: dict[str, Node], target: DataclassInstance, path: str = "", only: Collection[str] | None = None
    ) -> None:
        """Set the fields of the dataclass `target`, or `only` some. Raises MismatchError if any name differs."""
        names = [field.name for field in saved_fields(target)]
        nodes = legacy.state_fields(type(target), nodes)
        if set(names) != set(nodes):
            missing, extra = set(names) - set(nodes), set(nodes) - set(names)
            raise MismatchError(
                f"{path or 'State'} has other fields (missing {sorted(missing)}, surplus {sorted(extra)})"
            )
        for name in names:
            if only is not None and name not in only:
                continue
            old = getattr(target, name, None)
            object.__setattr__(target, name, self(nodes[name], old, f"{path}.{name}".removeprefix(".")))

    def _of_object(self, node: Node, template: Any, path: str) -> Any:
        if not callable(getattr(template, "load_state_dict", None)):
            raise MismatchError(f"{path} was an object with a state, but build() made {type(template).__name__}")
        state = self(node["object"], None, path)
        try:
            template.load_state_dict(state)
        except UserError:
            raise
        except (KeyError, ValueError, RuntimeError) as error:
            raise MismatchError(f"{path}: {error}") from error
        if isinstance(template, torch.optim.Optimizer):
            _fit_moments(template, state)
        return template

    def _of_module(self, node: Node, template: object, path: str) -> nn.Module:
        if not isinstance(template, nn.Module):
            raise MismatchError(f"{path} was a module, but build() made {type(template).__name__}")
        own = template.state_dict()
        nodes = {name if name in own else legacy.weight(name): part for name, part in node["module"]}
        other = {name for name in set(own) ^ set(nodes) if name in nodes or not legacy.added(name)}
        if other:
            raise MismatchError(f"{path} has other weights: {sorted(other)[:4]}")
        own = {name: target for name, target in own.items() if name in nodes}
        if not _plain(template, own):
            try:
                template.load_state_dict({name: self(part, None, f"{path}.{name}") for name, part in nodes.items()})
            except RuntimeError as error:
                raise MismatchError(f"{path}: {error}") from error
            return template
        for name, target in own.items():  # one tensor at a time: a whole state_dict would double the memory
            file, key = nodes[name]["tensor"]
            if list(target.shape) != self._reader.shape(file, key):
                raise MismatchError(
                    f"{path}.{name} has shape {self._reader.shape(file, key)}, not {list(target.shape)}"
                )
            self._reader.read_into(file, key, target)
        return template


def _plain(module: nn.Module, state: dict[str, Any]) -> bool:
    """Whether the tensors of `state_dict()` are the module's own storage and can be filled directly."""
    if not all(isinstance(value, Tensor) and value.dtype != torch.complex128 for value in state.values()):
        return False
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    if any(value.untyped_storage().data_ptr() not in own for value in state.values()):
        return False
    return not any(m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks for m in module.modules())


def _fit_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the dtypes of moments, which `Optimizer.load_state_dict` casts to the dtype of their parameter.

    Their strides become those of their parameter: a file holds tensors row by row, and a fused optimizer pairs weights
    and moments in the order of memory.
    """
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)):
                continue
            if loaded.shape == parameter.shape and loaded.stride() != parameter.stride():
                optimizer.state[parameter][name] = torch.empty_like(parameter, dtype=saved.dtype).copy_(saved)
            elif saved.dtype != loaded.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device)


def _address(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(address: str, path: str) -> Any:
    """A dataclass or named tuple by its name, from a loaded module or one of ours; nothing else is ever imported."""
    module, _, name = address.partition(":")
    if module not in sys.modules and module.startswith("foresight."):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MismatchError(f"{path} needs {address}, which cannot be imported") from error
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
        return found
    raise MismatchError(f"{path} needs the class {address}, which does not exist here")


def generators(value: object, depth: int = 6) -> Iterator[Generator]:
    """Every random generator within a State (dataclasses, lists, tuples, dicts and attributes of plain objects)."""
    if isinstance(value, Generator):
        yield value
        return
    if depth == 0 or isinstance(value, Tensor | np.ndarray | nn.Module | type | types.ModuleType):
        return
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value[:64]  # long lists are data, not generators
    elif dataclasses.is_dataclass(value):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
    for part in parts:
        yield from generators(part, depth - 1)
