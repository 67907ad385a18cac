"""GTopK: workers merge their largest gradients in pairs and keep the largest, until all have the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import Message, Turn
from thinwire.traffic import Round
from thinwire.wire.base import Wire


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
    """Keep only the largest gradients over all workers: 3k words in each of log2(P) rounds.

    With a = gradient + residual, every worker begins with the k largest of its own a. In each round two
    blocks of workers add up what they have and keep the k largest of the sum (of equal ones that of lower
    index); the step is made with what is left after the last round, divided by P. No gradient is lost: what
    a merge drops goes into the residual of the worker with rank `index mod B` in the merged block of B
    workers, also if the same index is kept elsewhere. What residuals still hold at the indices that were
    kept goes with the messages of the next step, and is applied in that.

    Reference: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks, 2019, arXiv:1901.04359.
    """

    complete: bool = True
    """Apply all that any worker holds at the indices that are kept, for k more words in each round; without,
    only what workers selected there, as in the paper."""

    @property
    def completes(self) -> bool:
        return self.complete

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        from thinwire.compress.sparse import merge_messages_

        inbox = Message(turn.new_words(turn.form.num_words), turn.form)
        own, other = message.sparse, inbox.sparse
        own_rest, other_rest = message.travelling(turn.residual), inbox.travelling(turn.residual)
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
                own_rest.add_(other_rest)
            elif hop.receives:
                message = inbox
        if not turn.is_meta:
            state.weights[turn.index] = 1.0 + message.passed
            state.keep_(turn.index, message)
            tail, held = message.tail(turn.residual), message.held(turn.residual)
            turn.finish_([message.entries()], tail, wire.world_size, held)

    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        levels = world_size.bit_length() - 1
        core = 1 << levels
        size, others = form.num_bytes, world_size - core
        if others:
            yield Round(op="exchange", send_bytes=size, ranks=(core, world_size))
            yield Round(op="exchange", recv_bytes=size, ranks=(0, others))
        for _ in range(levels):
            yield Round(op="exchange", send_bytes=size, recv_bytes=size, ranks=(0, core))
        if others:
            yield Round(op="exchange", send_bytes=size, ranks=(0, others))
            yield Round(op="exchange", recv_bytes=size, ranks=(core, world_size))
