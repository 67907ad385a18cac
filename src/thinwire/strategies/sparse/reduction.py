"""One bucket's reduction in one step: its message, and the mean of all messages."""

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
from thinwire.strategies.sparse.format import MessageFormat

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

    def tail(self, like: Tensor) -> Tensor:
        """The part that travels as it is, a view with the dtype of `like`."""
        return self._after(like)[: self.format.tail]

    def held(self, like: Tensor) -> Tensor:
        """The part for leftover residuals, a view with the dtype of `like`."""
        return self._after(like)[self.format.tail : self.format.tail + self.format.held]

    def dense(self, like: Tensor) -> Tensor:
        """Both of them: the part that is summed number by number."""
        return self._after(like)[: self.format.tail + self.format.held]

    def _after(self, like: Tensor) -> Tensor:
        return self.words[self.format.layout.num_words :].view(like.dtype)

    def to(self, device: torch.device) -> Message:
        return Message(self.words.to(device), self.format)

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
    """Entries on the host that wait for `finish_`, if the residual is elsewhere: one copy there for all
    merges."""

    @property
    def tag(self) -> int:
        """The first tag of this bucket's exchanges."""
        return self.index * TAGS

    @property
    def is_meta(self) -> bool:
        """Sizes alone, without numbers."""
        return self.lossy.is_meta

    def new_message(self) -> Message:
        """An empty message where the gradients are."""
        return Message(new_words(self.format.num_words, self.residual.device), self.format)

    @property
    def device(self) -> torch.device:
        """Where messages are read and merged."""
        home = self.lossy.device
        small = not self.is_meta and self.format.layout.capacity <= MOST_ON_HOST
        return torch.device("cpu") if small else home

    def new_words(self, count: int) -> Tensor:
        """Zeros for messages of `count` words there."""
        return new_words(count, self.device)

    def merge_(self, message: Message, other: Message, *, share: tuple[int, int]) -> None:
        """Overwrite a message with the largest of its sum with another; this worker's share of the rest goes
        back to its residual."""
        if not self.is_meta:
            rest = merge_messages_(message.sparse, other.sparse, self.format.layout, share=share)
            self.give_back_(rest)
            message.dense(self.residual).add_(other.dense(self.residual))

    def give_back_(self, entries: Sparse) -> None:
        """Keep entries that are not applied, to be sent later."""
        if entries.index.device == self.residual.device:
            add_(self.residual, entries)
        else:
            self.returned.append(entries)

    def finish_(
        self, sums: Iterable[Sparse], tail: Tensor, world_size: int, held: Tensor | None = None
    ) -> None:
        """Overwrite the gradients with the mean: these entries, this tail and these leftover residuals are
        sums over workers."""
        # Half-precision gradients are summed in the residual's precision.
        wide = (
            self.lossy
            if self.lossy.dtype == self.residual.dtype
            else self.residual.new_zeros(self.lossy.shape)
        )
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

    @classmethod
    def new(cls, reduction: Reduction, format: MessageFormat, count: int) -> MessageRows:
        """`count` empty messages."""
        return cls(reduction.new_words(count * format.num_words), format)

    @property
    def rows(self) -> Tensor:
        return self.words.view(-1, self.format.num_words)

    @property
    def passed(self) -> int:
        """How many numbers were above the threshold, over all workers whose entries are in here."""
        return int(self.rows[:, PASSED].sum())

    def messages(self) -> list[Message]:
        return [Message(row, self.format) for row in self.rows]

    def tails(self, like: Tensor) -> Tensor:
        """The parts that travel as they are, in rows."""
        return self.rows[:, self.format.layout.num_words :].view(like.dtype)[:, : self.format.tail]

    def write_tail_(self, tail: Tensor) -> None:
        """Cut a tail into equal parts, one for each message."""
        tails = self.tails(tail)
        padded = tail.new_zeros(tails.numel())
        padded[: tail.numel()] = tail
        tails.copy_(padded.view(tails.shape))
