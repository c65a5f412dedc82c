"""Writes and reads safetensors files one tensor at a time, so that a large state is never in memory twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 23  # bytes hashed and written at once
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def write(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write a safetensors file and sync it. Returns `{"sha256", "size"}` of the file.

    `safetensors.torch.save_file` does the same, but copies every tensor into bytes objects first.
    """
    named = list(tensors)
    header, offset = {}, 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        offsets = [offset, offset + size]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in named:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            file.write(_bytes(plain))
    return file.digest


class HashedFile:
    """A new file, hashed while it is written and synced when closed; `digest` then holds `{"sha256", "size"}`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._size = 0
        self.digest: dict[str, Any] = {}

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._hash.update(part)
            self._size += len(part)
            while len(part):  # an unbuffered write may take only a part
                part = part[self._file.write(part) :]

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        self.digest = {"sha256": self._hash.hexdigest(), "size": self._size}


def digest(path: Path) -> dict[str, Any]:
    """`{"sha256", "size"}` of an existing file."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(CHUNK):
            sha256.update(part)
            size += len(part)
    return {"sha256": sha256.hexdigest(), "size": size}


class Reader:
    """Reads single tensors from the safetensors files of one folder into newly allocated memory.

    A memory map would open faster, but a mapped file that is deleted or truncated crashes the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def read(self, file: str, name: str) -> Tensor:
        """A new CPU tensor."""
        entry = self._entry(file, name)[1]
        out = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.read_into(file, name, out)
        return out

    def read_all(self, file: str) -> dict[str, Tensor]:
        """All tensors of a file by name."""
        return {name: self.read(file, name) for name in self._header(file)[1]}

    def read_into(self, file: str, name: str, out: Tensor) -> None:
        """Fill `out`, which must have the shape of the stored tensor. Dtype and device are converted."""
        start, entry = self._entry(file, name)
        if list(out.shape) != entry["shape"]:
            raise ValueError(f"{name} has shape {entry['shape']} in the file, but {list(out.shape)} here")
        dtype = DTYPES[entry["dtype"]]
        direct = out.is_contiguous() and out.device.type == "cpu" and out.dtype == dtype
        target = out.detach() if direct else torch.empty(entry["shape"], dtype=dtype)
        view = _bytes(target)
        begin, end = entry["data_offsets"]
        if end - begin != len(view):
            raise ValueError(f"{file} is not a valid safetensors file: {name} has {end - begin} bytes")
        with (self._folder / file).open("rb", buffering=0) as stream:
            stream.seek(start + begin)
            done = 0
            while done < len(view):
                count = stream.readinto(view[done : done + CHUNK])
                if not count:
                    raise ValueError(f"{file} ends within {name}")
                done += count
        if not direct:
            with torch.no_grad():
                out.copy_(target)

    def shape(self, file: str, name: str) -> list[int]:
        """The shape of a stored tensor."""
        return list(self._entry(file, name)[1]["shape"])

    def _entry(self, file: str, name: str) -> tuple[int, dict[str, Any]]:
        start, header = self._header(file)
        return start, header[name]

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        if file not in self._headers:
            with (self._folder / file).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                self._headers[file] = 8 + length, json.loads(stream.read(length))
        return self._headers[file]


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
