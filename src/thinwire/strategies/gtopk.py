"""GTopK: workers merge their largest gradients in pairs and keep the largest, until all have the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.plan import MessageFormat
from thinwire.strategies.sparse.reduction import Message, Reduction
from thinwire.strategies.sparse.state import SparseState
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One exchange with one peer."""

    number: int
    peer: int
    sends: bool = False
    receives: bool = False
    block: int = 0
    """Workers that merge the same two vectors in this hop; 0: the result is received."""


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
    """Keep only the largest gradients over all workers: 3k words in each of log2(P) rounds.

    With a = gradient + residual, every worker begins with the k largest of its own a. In each round two
    blocks of workers add their sparse vectors and keep the k largest of the sum (of equal ones that of lower
    index); the step is made with the result of the last round, divided by P. No gradient is lost: an entry
    that a merge drops goes into the residual of the worker with rank `index mod B` in the merged block of B
    workers, also if the same index is kept elsewhere. Leftover residual at kept indices is sent, and applied,
    one step later.

    Reference: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks, 2019, arXiv:1901.04359.
    """

    complete: bool = True
    """Apply the residuals of all workers at the kept indices, for k more words in each round; without, only
    the numbers that workers selected there, as in the paper."""

    @property
    def completes(self) -> bool:
        return self.complete

    async def share(self, reduction: Reduction, message: Message, state: SparseState, wire: Wire) -> None:
        inbox = Message(reduction.new_words(reduction.format.num_words), reduction.format)
        for hop in hops(wire.rank, wire.world_size):
            send, recv = message.words if hop.sends else None, inbox.words if hop.receives else None
            tag = reduction.tag + hop.number
            await wire.exchange(send=send, to=hop.peer, recv=recv, source=hop.peer, tag=tag)
            if hop.block:
                reduction.merge_(message, inbox, share=(wire.rank % hop.block, hop.block))
            elif hop.receives:
                message = inbox
        if not reduction.is_meta:
            state.weights[reduction.index] = 1.0 + message.passed
            state.remember_(reduction.index, message)
            reduction.finish_([message.entries()], message.tail, wire.world_size, message.held)

    def sent_bytes(self, format: MessageFormat, world_size: int) -> int:
        levels = world_size.bit_length() - 1
        return (levels + (world_size > 1 << levels)) * format.num_bytes
