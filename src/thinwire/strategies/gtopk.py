"""GTopK: workers merge their largest gradients in pairs and keep the largest, until all have the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import TAGS, Message, Turn
from thinwire.traffic import Round
from thinwire.wire.base import Wire

if TYPE_CHECKING:
    from torch import Tensor


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


async def meet(hop: Hop, wire: Wire, own: Tensor, other: Tensor, *, tag: int) -> None:
    """Send `own` to the peer, and receive its into `other`, as the hop says."""
    await wire.exchange(
        send=own if hop.sends else None,
        to=hop.peer if hop.sends else None,
        recv=other if hop.receives else None,
        source=hop.peer if hop.receives else None,
        tag=tag + hop.number,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GTopK(SparseStrategy):
    """Keep only the largest gradients over all workers: 3k words in each of log2(P) rounds.

    With a = gradient + residual, every worker begins with the k largest of its own a. In each round two
    blocks of workers add up what they have and keep the k largest of the sum (of equal ones that of lower
    index). No gradient is lost: what a merge drops goes into the residual of the worker with rank
    `index mod B` in the merged block of B workers, also if the same index is kept elsewhere. The step is made
    with what is left after the last round and what residuals hold at these indices, divided by P.

    Reference: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks, 2019, arXiv:1901.04359.
    """

    complete: bool = True
    """Apply all that any worker holds at the indices that are kept, for k more words in each round; without,
    only what workers selected there, as in the paper."""

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        from thinwire.compress.sparse import Sparse, merge_messages_

        inbox = Message(turn.new_words(turn.form.num_words), turn.form)
        own, other = message.sparse, inbox.sparse
        own_tail, other_tail = message.tail(turn.residual), inbox.tail(turn.residual)
        for hop in hops(wire.rank, wire.world_size):
            await meet(hop, wire, message.words, inbox.words, tag=turn.tag)
            if turn.is_meta:
                continue
            if hop.block:
                share = wire.rank % hop.block, hop.block
                turn.give_back_(merge_messages_(own, other, turn.form.layout, share=share))
                own_tail.add_(other_tail)
            elif hop.receives:
                message = inbox
        held = await self._held(turn, message, state, wire) if self.complete else None
        if not turn.is_meta:
            sums = [message.entries()]
            if held is not None:
                index = sums[0].index
                sums.append(Sparse(index, held[: index.numel()]))
            state.weights[turn.index] = 1.0 + message.passed
            turn.finish_(sums, message.tail(turn.residual), wire.world_size)

    async def _held(self, turn: Turn, result: Message, state: SparseState, wire: Wire) -> Tensor:
        """Take out of residuals what they hold at the indices of the result; the sum over all workers."""
        own, other = (turn.new_words(_num_words(turn.form)).view(turn.residual.dtype) for _ in range(2))
        if not turn.is_meta:
            own[: result.count] = turn.take_(result.entries().index)
            self.stop_(result, turn, state)
        for hop in hops(wire.rank, wire.world_size):
            await meet(hop, wire, own, other, tag=turn.tag + TAGS // 2)
            if hop.block:
                own.add_(other)
            elif hop.receives:
                own = other
        return own

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
