"""TopK: every worker's largest gradients go to everyone, who adds them up."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.plan import MessageFormat
from thinwire.strategies.sparse.reduction import Message, MessageRows, Reduction, gather
from thinwire.strategies.sparse.state import SparseState
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(SparseStrategy):
    """Send the largest gradients of each worker to all others; the rest is added to the next ones.

    With a = gradient + residual, S the k largest of a on this worker: a[S] is sent, the rest is the next
    residual, and the step is made with the sum of all that was sent, divided by P. Each worker receives
    2k (P - 1) words.

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
    arXiv:1704.05021; with `momentum`, Lin et al., Deep Gradient Compression, 2018, arXiv:1712.01887.
    """

    async def share(self, reduction: Reduction, message: Message, state: SparseState, wire: Wire) -> None:
        everyones = MessageRows(await gather(message.words, wire, tag=reduction.tag), reduction.format)
        if reduction.is_meta:
            return
        state.weights[reduction.index] = 1.0 + everyones.passed
        # One after another, not all at once: on a GPU too, all workers get the same bits.
        sums = (Message(row, reduction.format).entries() for row in everyones.rows)
        reduction.finish_(sums, everyones.tails.sum(0), wire.world_size)

    def sent_bytes(self, format: MessageFormat, world_size: int) -> int:
        return (world_size - 1) * format.num_bytes
