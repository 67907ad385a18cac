"""Codecs: how a row of numbers looks in a message, lossy or not, and what the other end will see of it.

A codec does not remember anything. Whoever encodes keeps the difference between what was meant and what is
seen, and adds it to what is sent next (error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.compress import payload as payloads
from thinwire.compress.kernels import cpu_kernels
from thinwire.compress.payload import ALIGN_BYTES, ChangePayload, payload_bytes

CHUNK = 256
"""Numbers of which the largest are sent; an index within them is one byte."""
FEW = 32
"""Numbers of a chunk up to which looking for the weakest of those found so far is faster than a sort."""
WIDER = 3
"""Largest factor on the numbers sent of a sum, which has more that matter than each of its terms."""
_COMPILED = (torch.float32, torch.float64)
_LARGEST = 127


class Codec(Protocol):
    """Rows of numbers to rows of bytes and back; both ends get the same bits."""

    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes that a row of `numel` numbers of `itemsize` bytes becomes."""

    def encode_(self, messages: Tensor, data: Tensor) -> Tensor:
        """Overwrite messages with rows of data; gives the numbers as the other end will see them."""

    def decode(self, messages: Tensor, like: Tensor) -> Tensor:
        """The rows in messages, each as long and of the same dtype as the row `like`."""

    def of_sum(self, num_terms: int) -> Codec:
        """The codec for a sum of `num_terms` rows that were encoded by this one."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Every number, in the bits of its payload."""

    payload: ChangePayload

    def num_bytes(self, numel: int, itemsize: int) -> int:
        return payload_bytes(self.payload, numel, itemsize)

    def encode_(self, messages: Tensor, data: Tensor) -> Tensor:
        return payloads.encode_(messages, data, self.payload)

    def decode(self, messages: Tensor, like: Tensor) -> Tensor:
        return payloads.decode(messages, self.payload, like)

    def of_sum(self, num_terms: int) -> Codec:
        return self


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest numbers of every chunk of 256, equally many of each: two bytes for each number, and two for
    the scale of a chunk. Rows are whole chunks.

    >>> Largest(8).num_bytes(25_600, 4), Dense("fp32").num_bytes(25_600, 4)
    (1800, 102400)
    """

    count: int
    """Numbers sent of every chunk."""

    @classmethod
    def of(cls, density: float) -> Largest:
        """The largest share of a vector."""
        return cls(max(1, round(density * CHUNK)))

    @property
    def density(self) -> float:
        """Part of the numbers that are sent."""
        return self.count / CHUNK

    def num_bytes(self, numel: int, itemsize: int) -> int:
        return -(-numel // CHUNK * (2 * self.count + 2) // ALIGN_BYTES) * ALIGN_BYTES

    @torch.no_grad()
    def encode_(self, messages: Tensor, data: Tensor) -> Tensor:
        if data.is_meta:
            return data  # sizes alone, without numbers
        rows = data.reshape(len(data), -1, CHUNK)
        place = self._largest(rows)
        value = rows.gather(2, place)
        scales, places, codes = self._parts(messages, rows.shape[1])
        scales.copy_(value.abs().amax(2) / _LARGEST)
        steps = scales.to(data.dtype)[..., None]
        # A chunk of zeros has scale 0; whatever it is divided by, its codes are 0.
        rounded = (value / steps.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        rounded.clamp_(-_LARGEST, _LARGEST)
        places.copy_(place.view(places.shape))
        codes.copy_(rounded.view(codes.shape))
        return torch.zeros_like(rows).scatter_(2, place, rounded.mul_(steps)).view(data.shape)

    @torch.no_grad()
    def decode(self, messages: Tensor, like: Tensor) -> Tensor:
        rows = like.new_zeros((len(messages), like.numel() // CHUNK, CHUNK))
        if not messages.is_meta:
            scales, places, codes = self._parts(messages, rows.shape[1])
            shape = (*rows.shape[:2], self.count)
            values = codes.reshape(shape).to(like.dtype).mul_(scales.to(like.dtype)[..., None])
            rows.scatter_(2, places.reshape(shape).long(), values)
        return rows.view(len(messages), -1)

    def of_sum(self, num_terms: int) -> Codec:
        return codec_of("int8", min(num_terms, WIDER) * self.density)

    def _largest(self, rows: Tensor) -> Tensor:
        kernels = cpu_kernels(rows) if self.count <= FEW and rows.dtype in _COMPILED else None
        if kernels is None:
            return rows.abs().topk(self.count, dim=2, sorted=False).indices
        place: Tensor = kernels.largest_in_rows(rows.view(-1, CHUNK), self.count)
        return place.view(*rows.shape[:2], self.count)

    def _parts(self, messages: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scales, places within chunks, and values of every message: views."""
        ends = 2 * chunks, (2 + self.count) * chunks, (2 + 2 * self.count) * chunks
        scales, places, codes, _ = messages.tensor_split(ends, dim=1)
        return scales.view(torch.bfloat16), places, codes.view(torch.int8)


MOST_SPARSE = 0.4
"""Density from which on sending all numbers in one byte each is shorter."""


def codec_of(payload: ChangePayload | None, density: float) -> Codec:
    """All numbers in a payload (none: signs), or the shortest way to send a part of them: the largest of
    every chunk, or all in one byte each.

    >>> codec_of(None, 1.0), codec_of("int4", 1.0), codec_of(None, 0.03), codec_of(None, 0.9)
    (Dense(payload='sign'), Dense(payload='int4'), Largest(count=8), Dense(payload='int8'))
    """
    if density >= 1:
        return Dense(payload or "sign")
    return Dense("int8") if density > MOST_SPARSE else Largest.of(density)
