"""The samples a worker holds, one row of every field each, and their encoding as bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import SettingError, check

Field = Tensor | list[Tensor]
"""A tensor with one row per sample, or a list with one tensor per sample whose lengths differ."""


@dataclass(frozen=True, slots=True)
class _RowFormat:
    """Dtype and shape of a field's rows; for a list, those of one item of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_list: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {(('any', *self.shape)) if self.is_list else self.shape}".replace("'", "")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_LENGTH = _RowFormat(torch.int64, (), is_list=False)


class SampleTable:
    """The samples a worker holds. The fields stay the user's own; `put` overwrites their rows in place.

    Encoded rows are a head (rows of tensors, and the lengths of the rows of lists), whose size follows from
    the number of rows, and a tail with the items of the lists, whose size follows from the head.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        if not fields:
            raise SettingError("fields must be one or more, got none", hint="for example inputs, labels")
        self.fields = list(fields)
        self.formats = [_row_format(index, field) for index, field in enumerate(fields)]
        """Format of each field's rows; tables with equal formats can exchange rows."""
        self._head_formats = [_LENGTH if each.is_list else each for each in self.formats]
        self._list_formats = [each for each in self.formats if each.is_list]
        self.has_lists = bool(self._list_formats)
        lengths = [len(field) for field in fields]
        if len(set(lengths)) > 1:
            raise SettingError(f"fields must have one row per sample each, got {lengths} rows")
        check(lengths[0] > 0, "fields", "of at least one sample", lengths[0])
        devices = {row.device for field in fields for row in (field if isinstance(field, list) else [field])}
        if len(devices) > 1:
            raise SettingError(f"fields must be on one device, got {sorted(map(str, devices))}")
        self.device = devices.pop()

    def __len__(self) -> int:
        return len(self.fields[0])

    def take(self, slots: Tensor) -> tuple[Field, ...]:
        """Return the rows in `slots`: a copy of those of a tensor, the very tensors of a list."""
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

    def encode(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the rows in `slots` into bytes: head and tail (empty without lists)."""
        rows, none = self.take(slots), self._empty([], [])
        head = [field if isinstance(field, Tensor) else _lengths(field) for field in rows]
        lists = [torch.cat(field) for field in rows if isinstance(field, list)]
        heads, tails = ([t.contiguous().view(-1).view(torch.uint8) for t in each] for each in (head, lists))
        return torch.cat([none, *heads]), torch.cat([none, *tails])

    def decode(self, head: Tensor, tail: Tensor) -> list[Field]:
        """Return the rows that `encode` has turned into bytes."""
        parts = self._split_head(head)
        items = iter(_split(tail, self._list_formats, self._list_lengths(parts)))
        # clones: one row must not keep the bytes of all those that came with it
        return [
            [row.clone() for row in next(items).split(part.tolist())] if each.is_list else part
            for each, part in zip(self.formats, parts, strict=True)
        ]

    def empty_head(self, count: int) -> Tensor:
        return self._empty(self._head_formats, [count] * len(self.formats))

    def empty_tail(self, head: Tensor) -> Tensor:
        return self._empty(self._list_formats, self._list_lengths(self._split_head(head)))

    def _empty(self, formats: Sequence[_RowFormat], counts: Sequence[int]) -> Tensor:
        return torch.empty(sum(_sizes(formats, counts)), dtype=torch.uint8, device=self.device)

    def _split_head(self, head: Tensor) -> list[Tensor]:
        count = len(head) // sum(each.num_bytes for each in self._head_formats)
        return _split(head, self._head_formats, [count] * len(self.formats))

    def _list_lengths(self, head: list[Tensor]) -> list[int]:
        pairs = zip(self.formats, head, strict=True)
        return [int(lengths.sum()) for each, lengths in pairs if each.is_list]

    def dump(self) -> dict[str, Any]:
        """Return all rows, by the number of their field; the user's tensors are not copied."""
        return {
            str(index): {"lengths": _lengths(field).cpu(), "items": torch.cat(field)}
            if isinstance(field, list)
            else field
            for index, field in enumerate(self.fields)
        }

    def load(self, saved: Sequence[dict[str, Any]], rows: Tensor) -> None:
        """Overwrite all rows with those numbered `rows` of what one or several workers have dumped."""
        fields: list[Field] = []
        for index, each in enumerate(self.formats):
            parts = [dump[str(index)] for dump in saved]
            if each.is_list:
                items = [row for part in parts for row in part["items"].split(part["lengths"].tolist())]
                fields.append([items[row].to(self.device, copy=True) for row in rows.tolist()])
            else:
                fields.append(torch.cat(parts).index_select(0, rows).to(self.device))
        self.put(torch.arange(len(self)), fields)

    @staticmethod
    def num_dumped(saved: dict[str, Any]) -> int:
        first = saved["0"]
        return len(first["lengths"] if isinstance(first, dict) else first)


def _row_format(index: int, field: object) -> _RowFormat:
    if isinstance(field, Tensor):
        if field.dim() == 0:
            raise SettingError(f"field {index} must have one row per sample, got a single number")
        return _RowFormat(field.dtype, tuple(field.shape[1:]), is_list=False)
    if not isinstance(field, list) or not all(isinstance(row, Tensor) and row.dim() > 0 for row in field):
        raise SettingError(
            f"field {index} must be a tensor or a list of tensors with lengths, got {type(field).__name__}",
            hint="text can travel as its bytes: torch.tensor(list(text.encode()), dtype=torch.uint8)",
        )
    formats = {_RowFormat(row.dtype, tuple(row.shape[1:]), is_list=True) for row in field}
    check(bool(formats), f"field {index}", "of at least one sample", field)
    if len(formats) != 1:
        alike = "of one dtype, and alike but for their length"
        raise SettingError(f"field {index} must hold tensors {alike}, got {sorted(map(str, formats))}")
    return formats.pop()


def _lengths(field: list[Tensor]) -> Tensor:
    return torch.tensor([len(row) for row in field], device=field[0].device)


def _sizes(formats: Sequence[_RowFormat], counts: Sequence[int]) -> list[int]:
    return [each.num_bytes * count for each, count in zip(formats, counts, strict=True)]


def _split(data: Tensor, formats: Sequence[_RowFormat], counts: Sequence[int]) -> list[Tensor]:
    pieces = zip(data.split(_sizes(formats, counts)), formats, counts, strict=True)
    # clones: a slice of bytes need not be aligned for its dtype
    return [piece.clone().view(each.dtype).view(count, *each.shape) for piece, each, count in pieces]
