"""One bucket in one step: its message, and what comes of all messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from thinwire.compress.layout import COUNT, PASSED
from thinwire.strategies.sparse.form import Form

MOST_ON_HOST = 1 << 16
"""Entries of a message up to which the host is faster than a GPU."""
TAGS = 64
"""That belong to one bucket; more than it has exchanges with any number of workers."""

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from thinwire.compress.sparse import Sparse


@dataclass(frozen=True, slots=True)
class Message:
    """What travels: `form.num_words` words.

    Numbers are selected where they are. On a GPU their message, a thousandth of them, then goes to the host,
    which looks into it, merges and sends it faster than kernels can be started for all that.
    """

    words: Tensor
    form: Form

    @property
    def sparse(self) -> Tensor:
        """The part that `thinwire.compress` reads and writes."""
        return self.words[: self.form.layout.num_words]

    def tail(self, like: Tensor) -> Tensor:
        """The part that travels as it is, a view with the dtype of `like`."""
        return self._after(like)[: self.form.tail]

    def held(self, like: Tensor) -> Tensor:
        """The part for what residuals hold, a view with the dtype of `like`."""
        return self._after(like)[self.form.tail : self.form.tail + self.form.held]

    def travelling(self, like: Tensor) -> Tensor:
        """Both of them: what is added up as it is."""
        return self._after(like)[: self.form.tail + self.form.held]

    def _after(self, like: Tensor) -> Tensor:
        return self.words[self.form.layout.num_words :].view(like.dtype)

    def to(self, device: torch.device) -> Message:
        return Message(self.words.to(device), self.form)

    @property
    def count(self) -> int:
        return int(self.words[COUNT])

    @property
    def passed(self) -> int:
        """How many numbers were above the threshold, of all workers whose entries are in here."""
        return int(self.words[PASSED])

    def entries(self) -> Sparse:
        from thinwire.compress.sparse import read

        return read(self.sparse, self.form.layout)

    def write_(self, entries: Sparse, passed: int) -> None:
        """Overwrite the entries."""
        from thinwire.compress.sparse import write_

        write_(self.sparse, self.form.layout, entries)
        self.words[PASSED] = passed


@dataclass(frozen=True, slots=True)
class Turn:
    """The gradients of one bucket while they are reduced."""

    index: int
    """Of the bucket."""
    lossy: Tensor
    """Gradients of which only the large ones are sent."""
    tail: Tensor
    """What is sent as it is."""
    residual: Tensor
    form: Form
    """Of the message with what this worker sends."""
    kept: Tensor | None = None
    """Indices that were kept in the step before, if what residuals hold there is to be applied."""
    returned: list[Sparse] = field(default_factory=list, init=False)
    """What waits on the host for `finish_`, if the residual is elsewhere: sending it there takes as long for
    one merge as for all of them."""

    @property
    def tag(self) -> int:
        """The first of those of this bucket's exchanges."""
        return self.index * TAGS

    @property
    def is_meta(self) -> bool:
        """Sizes alone, without numbers."""
        return self.lossy.is_meta

    def new_message(self) -> Message:
        """An empty one where the gradients are."""
        from thinwire.compress.sparse import new_words

        return Message(new_words(self.form.num_words, self.residual.device), self.form)

    @property
    def device(self) -> torch.device:
        """Where messages are looked into and merged."""
        home = self.lossy.device
        small = not self.is_meta and self.form.layout.capacity <= MOST_ON_HOST
        return type(home)("cpu") if small else home

    def new_words(self, count: int) -> Tensor:
        """Room for messages of so many words there, all zero."""
        from thinwire.compress.sparse import new_words

        return new_words(count, self.device)

    def give_back_(self, entries: Sparse) -> None:
        """What is not applied stays to be sent later."""
        from thinwire.compress.sparse import add_

        if entries.index.device == self.residual.device:
            add_(self.residual, entries)
        else:
            self.returned.append(entries)

    def finish_(
        self, sums: Iterable[Sparse], tail: Tensor, world_size: int, held: Tensor | None = None
    ) -> None:
        """Overwrite the gradients with the mean: these entries, this tail, and what residuals held, of sums
        over workers."""
        from thinwire.compress.sparse import Sparse, add_, merge

        # Half-precision gradients are summed in what their residual has.
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
class Rows:
    """Several messages of one form that lie one after another."""

    words: Tensor
    form: Form

    @classmethod
    def new(cls, turn: Turn, form: Form, count: int) -> Rows:
        """So many empty ones."""
        return cls(turn.new_words(count * form.num_words), form)

    @property
    def rows(self) -> Tensor:
        return self.words.view(-1, self.form.num_words)

    @property
    def passed(self) -> int:
        """How many numbers were above the threshold, of all workers whose entries are in here."""
        return int(self.rows[:, PASSED].sum())

    def messages(self) -> list[Message]:
        return [Message(row, self.form) for row in self.rows]

    def tails(self, like: Tensor) -> Tensor:
        """The parts that travel as they are, in rows."""
        return self.rows[:, self.form.layout.num_words :].view(like.dtype)[:, : self.form.tail]

    def write_tail_(self, tail: Tensor) -> None:
        """Cut a tail into equal parts, one for each message."""
        tails = self.tails(tail)
        padded = tail.new_zeros(tails.numel())
        padded[: tail.numel()] = tail
        tails.copy_(padded.view(tails.shape))
