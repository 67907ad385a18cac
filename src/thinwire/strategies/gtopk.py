"""GTopK: workers merge their largest gradients in pairs and keep the largest, until all have the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import TAGS, Message, Turn
from thinwire.traffic import Round
from thinwire.wire.base import Wire

if TYPE_CHECKING:
    from thinwire.compress.sparse import Sparse


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One exchange with one peer."""

    number: int
    peer: int
    sends: bool = False
    receives: bool = False
    block: int = 0
    """Workers that merge the same two vectors in this hop; 0: what comes is the result."""


def hops(rank: int, world_size: int) -> Iterator[Hop]:
    """Recursive doubling over the first 2^h workers; each of the others hands in to one of them before, and
    gets the result from it after.

    >>> [hop.peer for hop in hops(1, 8)], [hop.peer for hop in hops(1, 6)], [hop.peer for hop in hops(5, 6)]
    ([0, 3, 5], [5, 0, 3, 5], [1, 1])
    """
    levels = world_size.bit_length() - 1
    core = 1 << levels
    if rank >= core:
        yield Hop(number=0, peer=rank - core, sends=True)
        yield Hop(number=levels + 1, peer=rank - core, receives=True)
        return
    if rank + core < world_size:
        yield Hop(number=0, peer=rank + core, receives=True, block=1)
    for level in range(levels):
        yield Hop(number=level + 1, peer=rank ^ (1 << level), sends=True, receives=True, block=2 << level)
    if rank + core < world_size:
        yield Hop(number=levels + 1, peer=rank + core, sends=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class GTopK(SparseStrategy):
    """Keep only the largest gradients over all workers: 2k words in each of log2(P) rounds.

    With a = gradient + residual, every worker begins with the k largest of its own a. In each round two
    blocks of workers add up what they have and keep the k largest of the sum (of equal ones that of lower
    index); the step is made with what is left after the last round, divided by P. No gradient is lost: what
    a merge drops goes into the residual of the worker with rank `index mod B` in the merged block of B
    workers, also if the same index is kept elsewhere.

    Reference: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks, 2019, arXiv:1901.04359.
    """

    complete: bool = True
    """Apply all that any worker holds at the places that were kept, not only what was selected there."""

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        from thinwire.compress.sparse import merge_messages_

        inbox = Message(turn.new_words(turn.form.num_words), turn.form)
        own, other = message.sparse, inbox.sparse
        own_tail, other_tail = message.tail(turn.residual), inbox.tail(turn.residual)
        for hop in hops(wire.rank, wire.world_size):
            await wire.exchange(
                send=message.words if hop.sends else None,
                to=hop.peer if hop.sends else None,
                recv=inbox.words if hop.receives else None,
                source=hop.peer if hop.receives else None,
                tag=turn.tag + hop.number,
            )
            if turn.is_meta:
                continue
            if hop.block:
                share = wire.rank % hop.block, hop.block
                turn.give_back_(merge_messages_(own, other, turn.form.layout, share=share))
                own_tail.add_(other_tail)
            elif hop.receives:
                message = inbox
        sums = [] if turn.is_meta else [message.entries()]
        if self.complete:
            sums += await self._held(turn, sums, state, wire)
        if not turn.is_meta:
            state.weights[turn.index] = 1.0 + message.passed
            turn.finish_(sums, message.tail(turn.residual), wire.world_size)

    async def _held(self, turn: Turn, kept: Sequence[Sparse], state: SparseState, wire: Wire) -> list[Sparse]:
        """Take what residuals hold at the places that were kept; the sum over all workers, which add it up in
        the same pairs."""
        from thinwire.compress.sparse import Sparse

        own, other = (turn.new_words(_num_words(turn.form)).view(turn.residual.dtype) for _ in range(2))
        for entries in kept:
            own[: entries.index.numel()] = turn.take_(entries.index)
            if self.momentum:  # what is sent shall not push on
                velocity = state.velocities[turn.index]
                velocity[entries.index.to(velocity.device)] = 0
        for hop in hops(wire.rank, wire.world_size):
            await wire.exchange(
                send=own if hop.sends else None,
                to=hop.peer if hop.sends else None,
                recv=other if hop.receives else None,
                source=hop.peer if hop.receives else None,
                tag=turn.tag + TAGS // 2 + hop.number,
            )
            if hop.block:
                own.add_(other)
            elif hop.receives:
                own = other
        return [Sparse(entries.index, own[: entries.index.numel()]) for entries in kept]

    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        yield from _rounds(form.num_bytes, world_size)
        if self.complete:
            yield from _rounds(4 * _num_words(form), world_size)


def _num_words(form: Form) -> int:
    """Of one number for each entry."""
    return form.layout.capacity * form.layout.itemsize // 4


def _rounds(size: int, world_size: int) -> Iterable[Round]:
    """The wire operations of all hops with messages of so many bytes."""
    levels = world_size.bit_length() - 1
    core = 1 << levels
    others = world_size - core
    if others:
        yield Round(op="exchange", send_bytes=size, ranks=(core, world_size))
        yield Round(op="exchange", recv_bytes=size, ranks=(0, others))
    for _ in range(levels):
        yield Round(op="exchange", send_bytes=size, recv_bytes=size, ranks=(0, core))
    if others:
        yield Round(op="exchange", send_bytes=size, ranks=(0, others))
        yield Round(op="exchange", recv_bytes=size, ranks=(core, world_size))
