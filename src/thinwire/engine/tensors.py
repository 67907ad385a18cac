"""Trees of tensors and plain values as one file, in the format of safetensors. Reading one runs no code.

    8 bytes    the length of the header, little-endian
    header     JSON: dtype, shape and place of each tensor by name; the tree, as text, in `__metadata__`
    the rest   the bytes of the tensors

The tree is JSON too. Numbers, strings, None and lists stand for themselves; an object with one key says what
else it is: `dict` (pairs of key and value), `tuple`, `tensor` or `array` (by name).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.files import open_regular

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors."""


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A copy of a tree that training cannot change any more."""

    tree: Any
    """As JSON, with names in the places of tensors."""
    tensors: Mapping[str, Tensor]


def snapshot(tree: Mapping[str, Any]) -> TreeSnapshot:
    """Copy a tree to the CPU; UsageError names the value that a file cannot hold."""
    tensors: dict[str, Tensor] = {}
    return TreeSnapshot(_take_out(tree, "", tensors), tensors)


def _take_out(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return _take_out(value.item(), name, tensors)
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        items = [(_take_out(k, name, tensors), f"{inner}{k}", each) for k, each in value.items()]
        return {"dict": [[key, _take_out(each, below, tensors)] for key, below, each in items]}
    if type(value) in (list, tuple, torch.Size):
        entries = [_take_out(each, f"{inner}{i}", tensors) for i, each in enumerate(value)]
        return entries if type(value) is list else {"tuple": entries}
    array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    if not array and not _is_plain(value):
        raise UsageError(
            f"{name} is a {type(value).__name__}, which a checkpoint cannot hold",
            hint="let state_dict() return tensors, arrays, numbers, strings, None, lists, tuples and dicts",
        )
    tensor = torch.from_numpy(np.array(value)) if array else value
    while name in tensors or name == _METADATA:  # {"a.b": x, "a": {"b": y}}
        name += "_"
    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return {"array" if array else "tensor": name}


def _is_plain(value: Any) -> bool:
    """Whether a tensor is all in one place, and of a dtype that the file knows."""
    if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
        return False  # such as a DTensor, of which this worker holds a part
    return value.layout is torch.strided and value.dtype in _NAMES and not value.is_meta


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_back(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dict":
        return {_put_back(key, tensors): _put_back(each, tensors) for key, each in content}
    if kind == "tuple":
        return tuple(_put_back(each, tensors) for each in content)
    if kind not in ("tensor", "array"):
        raise ValueError(f"{kind!r} is no kind of value")
    return tensors[content] if kind == "tensor" else tensors[content].numpy()


# -- files ----------------------------------------------------------------------------------------


def write(path: Path, taken: TreeSnapshot) -> dict[str, Any]:
    """Write a snapshot into a new file, which has reached the disk when this returns; its size and digest."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in _pieces(taken):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def pack(taken: TreeSnapshot) -> Tensor:
    """The bytes that a file would have, to be sent."""
    return torch.frombuffer(bytearray(b"".join(_pieces(taken))), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The tree whose snapshot was packed; ValueError if it cannot be understood."""
    return _understand(io.BytesIO(data.numpy().data), data.numel())


def _pieces(taken: TreeSnapshot) -> Iterator[Any]:
    header: dict[str, Any] = {_METADATA: {"tree": json.dumps(taken.tree)}}
    end = 0
    for name, tensor in taken.tensors.items():
        begin, end = end, end + tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _NAMES[tensor.dtype], **place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors can be mapped
    yield len(text).to_bytes(8, "little")
    yield text
    yield from map(_as_bytes, taken.tensors.values())


def _as_bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy().data


def read(path: Path, facts: Mapping[str, Any]) -> Any:
    """The tree whose snapshot was written; ValueError or OSError unless the file is as `facts` say."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != facts["bytes"]:
            raise ValueError(f"has {num_bytes:,} bytes instead of {facts['bytes']:,}")
        if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
            raise ValueError("is not as it was written")
        file.seek(0)
        return _understand(file, num_bytes)


def _understand(file: BufferedReader | io.BytesIO, num_bytes: int) -> Any:
    try:
        return _parse(file, num_bytes)
    # a crafted file can have a right digest: whatever it makes the parser do ends here
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"cannot be understood ({type(error).__name__}: {error})") from error


def _parse(file: BufferedReader | io.BytesIO, num_bytes: int) -> Any:
    length = int.from_bytes(file.read(8), "little")
    if length > min(num_bytes - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"a header of {length:,} bytes")
    header = json.loads(file.read(length))
    tree = json.loads(header.pop(_METADATA)["tree"])
    end, rest = 0, num_bytes - 8 - length
    tensors = {}
    for name, entry in header.items():
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has shape {shape}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [begin, end] or end > rest:  # said before memory is taken
            raise ValueError(f"{name} lies at {entry['data_offsets']}")
        flat = torch.empty(end - begin, dtype=torch.uint8)
        if file.readinto(flat.numpy().data) != end - begin:
            raise ValueError(f"{name} is cut off")
        tensors[name] = flat.view(dtype).view(shape)
    if end != rest:
        raise ValueError("bytes that belong to no tensor")
    return _put_back(tree, tensors)
