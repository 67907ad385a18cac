"""One bucket's reduction in one step: its message, everybody's messages, and their mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from thinwire.compress.sparse import (
    COUNT,
    PASSED,
    Sparse,
    add_,
    merge,
    merge_messages_,
    new_words,
    read,
    write_,
)
from thinwire.strategies.sparse.plan import MessageFormat
from thinwire.wire.wire import Wire

MOST_ON_HOST = 1 << 16
"""Entries of a message up to which the host is faster than a GPU."""
TAGS = 64
"""Tags for the exchanges of one bucket; more than it has with any number of workers."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of `format.num_words` words.

    Numbers are selected where they are. On a GPU their message, a thousandth of them, then goes to the host,
    which reads, merges and sends it faster than kernels can be started for all that.
    """

    words: Tensor
    format: MessageFormat

    @property
    def sparse(self) -> Tensor:
        """The part that `thinwire.compress` reads and writes."""
        return self.words[: self.format.layout.num_words]

    @property
    def dense(self) -> Tensor:
        """The part that is summed number by number: the tail, then leftover residuals."""
        after = self.words[self.format.layout.num_words :].view(self.format.layout.dtype)
        return after[: self.format.tail + self.format.held]

    @property
    def tail(self) -> Tensor:
        return self.dense[: self.format.tail]

    @property
    def held(self) -> Tensor:
        return self.dense[self.format.tail :]

    @property
    def count(self) -> int:
        return int(self.words[COUNT])

    @property
    def passed(self) -> int:
        """How many numbers were above the threshold, over all workers whose entries are in here."""
        return int(self.words[PASSED])

    def entries(self) -> Sparse:
        return read(self.sparse, self.format.layout)

    def write_(self, entries: Sparse, passed: int) -> None:
        """Overwrite the entries."""
        write_(self.sparse, self.format.layout, entries)
        self.words[PASSED] = passed


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of one bucket while they are reduced."""

    index: int
    """The bucket's."""
    lossy: Tensor
    """Gradients of which only the large ones are sent."""
    tail: Tensor
    """Gradients and bookkeeping that are sent as they are."""
    residual: Tensor
    format: MessageFormat
    """The format of the message with this worker's numbers."""
    kept: Tensor | None = None
    """Indices applied in the step before, if leftover residuals there are to be applied."""
    returned: list[Sparse] = field(default_factory=list, init=False)
    """Entries on the host that wait for `finish_` if the residual is elsewhere, to be copied once."""

    @property
    def tag(self) -> int:
        """The first tag of this bucket's exchanges."""
        return self.index * TAGS

    @property
    def is_meta(self) -> bool:
        """Sizes alone, without numbers."""
        return self.lossy.is_meta

    @property
    def device(self) -> torch.device:
        """Where messages are read and merged."""
        small = not self.is_meta and self.format.layout.capacity <= MOST_ON_HOST
        return torch.device("cpu") if small else self.lossy.device

    def new_words(self, count: int) -> Tensor:
        """Zeros for messages of `count` words there."""
        return new_words(count, self.device)

    def merge_(self, message: Message, other: Message, *, share: tuple[int, int]) -> None:
        """Overwrite a message with the largest of its sum with another; give back a share of the rest."""
        if not self.is_meta:
            self.give_back_(merge_messages_(message.sparse, other.sparse, self.format.layout, share=share))
            message.dense.add_(other.dense)

    def give_back_(self, entries: Sparse) -> None:
        """Keep entries that are not applied, to be sent later."""
        if entries.index.device == self.residual.device:
            add_(self.residual, entries)
        else:
            self.returned.append(entries)

    def finish_(
        self, sums: Iterable[Sparse], tail: Tensor, world_size: int, held: Tensor | None = None
    ) -> None:
        """Overwrite the gradients with the mean: all that is given are sums over workers."""
        # Half-precision gradients are summed in the residual's precision.
        fits = self.lossy.dtype == self.residual.dtype
        wide = self.lossy if fits else torch.empty_like(self.residual)
        if self.returned:  # none twice, so that the sum does not depend on the order in which a GPU adds them
            add_(self.residual, reduce(merge, self.returned))
        wide.zero_()
        for entries in sums:
            add_(wide, entries, 1 / world_size)
        if self.kept is not None and held is not None:
            values = held[: self.kept.numel()].to(self.kept.device)
            add_(wide, Sparse(self.kept, values), 1 / world_size)
        if wide is not self.lossy:
            self.lossy.copy_(wide)
        self.tail.copy_(tail).div_(world_size)


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Several messages of one format that lie one after another."""

    words: Tensor
    format: MessageFormat

    @property
    def rows(self) -> Tensor:
        return self.words.view(-1, self.format.num_words)

    @property
    def passed(self) -> int:
        """How many numbers were above the threshold, over all workers whose entries are in here."""
        return int(self.rows[:, PASSED].sum())

    @property
    def tails(self) -> Tensor:
        """The parts that travel as they are, in rows."""
        layout = self.format.layout
        return self.rows[:, layout.num_words :].view(layout.dtype)[:, : self.format.tail]

    def write_tail_(self, tail: Tensor) -> None:
        """Cut a tail into equal parts, one for each message."""
        padded = tail.new_zeros(self.tails.numel())
        padded[: tail.numel()] = tail
        self.tails.copy_(padded.view(self.tails.shape))


async def gather(own: Tensor, wire: Wire, *, tag: int) -> Tensor:
    """The messages of all workers, one after another in order of rank.

    Each worker hands on all it has so far (Bruck's algorithm): log2(P) exchanges, where a ring takes P - 1.
    """
    rank, world_size = wire.rank, wire.world_size
    rows = own.new_empty((world_size, own.numel()))  # of this worker, of the next one, and so on
    rows[0] = own
    for number in range((world_size - 1).bit_length()):
        distance = 1 << number  # to the peers
        count = min(distance, world_size - distance)
        await wire.exchange(
            send=rows[:count].view(-1),
            to=(rank - distance) % world_size,
            recv=rows[distance : distance + count].view(-1),
            source=(rank + distance) % world_size,
            tag=tag + number,
        )
    return rows.roll(rank, 0).view(-1)
