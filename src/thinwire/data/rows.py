"""Samples in memory, one row of every field each, and how some of them look as bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import SettingError, check

Field = Tensor | list[Tensor]
"""A tensor with one row per sample, or a list with one tensor per sample whose lengths differ."""
_Part = tuple[torch.dtype, tuple[int, ...]]
"""Some of a message: what is in it, and its shape."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all rows of a field have in common; of a list it says what one item of a row looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_list: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {(('any', *self.shape)) if self.is_list else self.shape}".replace("'", "")

    def of(self, count: int) -> _Part:
        return self.dtype, (count, *self.shape)


@dataclass(slots=True, eq=False)
class Parcel:
    """Some rows as bytes."""

    head: Tensor
    """Rows of tensors, and lengths of the rows of lists: its size follows from the number of rows."""
    tail: Tensor | None = None
    """What is in the rows of lists, if there are any: its size follows from the head."""


class Rows:
    """The samples a worker holds. The fields stay the user's own; `put` overwrites their rows in place."""

    def __init__(self, fields: Sequence[Field]) -> None:
        if not fields:
            raise SettingError("fields must be one or more, got none", hint="for example inputs, labels")
        self.fields = list(fields)
        self._kinds = [_kind(index, field) for index, field in enumerate(fields)]
        lengths = [len(field) for field in fields]
        if len(set(lengths)) > 1:
            raise SettingError(f"fields must have one row per sample each, got {lengths} rows")
        check(lengths[0] > 0, "fields", "of at least one sample", lengths[0])
        devices = {
            each.device for field in fields for each in (field if isinstance(field, list) else [field])
        }
        if len(devices) > 1:
            raise SettingError(f"fields must be on one device, got {sorted(map(str, devices))}")
        self.device = devices.pop()

    def __len__(self) -> int:
        return len(self.fields[0])

    def describe(self) -> list[str]:
        """One line per field, the same wherever rows can be put."""
        return [str(kind) for kind in self._kinds]

    def take(self, slots: Tensor) -> tuple[Field, ...]:
        """The rows in `slots`: a copy of those of a tensor, the very tensors of a list."""
        return tuple(
            [field[slot] for slot in slots.tolist()]
            if isinstance(field, list)
            else field.index_select(0, slots.to(self.device))
            for field in self.fields
        )

    @torch.no_grad()
    def put(self, slots: Tensor, rows: Sequence[Field]) -> None:
        """Overwrite the rows in `slots`; on a GPU too they are there when this returns, for every stream."""
        for field, new in zip(self.fields, rows, strict=True):
            if isinstance(field, list):
                for slot, row in zip(slots.tolist(), new, strict=True):
                    field[slot] = row
            else:
                assert isinstance(new, Tensor)
                field.index_copy_(0, slots.to(self.device), new)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -- as bytes -----------------------------------------------------------------------------------

    def pack(self, slots: Tensor) -> Parcel:
        """A copy of the rows in `slots`, as bytes."""
        rows = self.take(slots)
        lists = [torch.cat(field) for field in rows if isinstance(field, list)]
        head = [field if isinstance(field, Tensor) else _lengths(field) for field in rows]
        return Parcel(_join(head), _join(lists) if lists else None)

    def unpack(self, parcel: Parcel) -> list[Field]:
        """The rows in a parcel."""
        head = self._split_head(parcel.head)
        if parcel.tail is None:
            return list(head)
        tail = iter(_split(parcel.tail, self._tail_parts(head)))
        # clones: one row must not keep the bytes of all those that came with it
        return [
            [row.clone() for row in next(tail).split(part.tolist())] if kind.is_list else part
            for kind, part in zip(self._kinds, head, strict=True)
        ]

    def empty_head(self, count: int) -> Tensor:
        """Room for the first part of `count` rows."""
        return _room(self._head_parts(count), self.device)

    def empty_tail(self, head: Tensor) -> Tensor:
        """Room for the second part of the rows whose first part is `head`."""
        return _room(self._tail_parts(self._split_head(head)), self.device)

    def _head_parts(self, count: int) -> list[_Part]:
        return [(torch.int64, (count,)) if kind.is_list else kind.of(count) for kind in self._kinds]

    def _split_head(self, head: Tensor) -> list[Tensor]:
        one_row = sum(_num_bytes(part) for part in self._head_parts(1))
        return _split(head, self._head_parts(len(head) // one_row))

    def _tail_parts(self, head: list[Tensor]) -> list[_Part]:
        pairs = zip(self._kinds, head, strict=True)
        return [kind.of(int(lengths.sum())) for kind, lengths in pairs if kind.is_list]

    # -- saved --------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All rows, by the number of their field; what is a tensor already is not copied."""
        return {
            str(index): {"lengths": _lengths(field).cpu(), "items": torch.cat(field)}
            if isinstance(field, list)
            else field
            for index, field in enumerate(self.fields)
        }

    def load(self, saved: Sequence[dict[str, Any]], rows: Tensor) -> None:
        """Overwrite all rows with those numbered `rows` of what one or several workers have dumped."""
        fields: list[Field] = []
        for index, kind in enumerate(self._kinds):
            parts = [each[str(index)] for each in saved]
            if kind.is_list:
                texts = [row for part in parts for row in part["items"].split(part["lengths"].tolist())]
                fields.append([texts[row].to(self.device, copy=True) for row in rows.tolist()])
            else:
                fields.append(torch.cat(parts).index_select(0, rows).to(self.device))
        self.put(torch.arange(len(self)), fields)

    @staticmethod
    def num_dumped(saved: dict[str, Any]) -> int:
        """How many rows a dump holds."""
        first = saved["0"]
        return len(first["lengths"] if isinstance(first, dict) else first)


def _kind(index: int, field: object) -> _Kind:
    if isinstance(field, Tensor):
        if field.dim() == 0:
            raise SettingError(f"field {index} must have one row per sample, got a single number")
        return _Kind(field.dtype, tuple(field.shape[1:]), is_list=False)
    if not isinstance(field, list) or not all(isinstance(row, Tensor) and row.dim() > 0 for row in field):
        raise SettingError(
            f"field {index} must be a tensor or a list of tensors with lengths, got {type(field).__name__}",
            hint="text can travel as its bytes: torch.tensor(list(text.encode()), dtype=torch.uint8)",
        )
    kinds = {_Kind(row.dtype, tuple(row.shape[1:]), is_list=True) for row in field}
    check(bool(kinds), f"field {index}", "of at least one sample", field)
    if len(kinds) != 1:
        alike = "of one dtype, and alike but for their length"
        raise SettingError(f"field {index} must hold tensors {alike}, got {sorted(map(str, kinds))}")
    return kinds.pop()


def _lengths(field: list[Tensor]) -> Tensor:
    return torch.tensor([len(row) for row in field], device=field[0].device)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _room(parts: Sequence[_Part], device: torch.device) -> Tensor:
    return torch.empty(sum(_num_bytes(part) for part in parts), dtype=torch.uint8, device=device)


def _split(data: Tensor, parts: Sequence[_Part]) -> list[Tensor]:
    pieces = data.split([_num_bytes(part) for part in parts])
    # clones: a slice of bytes need not be aligned for its dtype
    return [
        piece.clone().view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, parts, strict=True)
    ]


def _num_bytes(part: _Part) -> int:
    dtype, shape = part
    return torch.Size(shape).numel() * dtype.itemsize
