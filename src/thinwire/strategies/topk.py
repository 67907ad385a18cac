"""TopK: every worker's largest gradients go to everyone, who adds them up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.gather import gather, gather_rounds
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import Message, Rows, Turn
from thinwire.traffic import Round
from thinwire.wire.base import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(SparseStrategy):
    """Send the largest gradients of each worker to all others; what is not sent is added to the next ones.

    With a = gradient + residual, S the k largest of a on this worker: a[S] is sent, the rest is the next
    residual, and the step is made with the sum of what was sent, divided by P. Each worker receives
    2k (P - 1) words.

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
    arXiv:1704.05021; with `momentum`, Lin et al., Deep Gradient Compression, 2018, arXiv:1712.01887.
    """

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        everyones = Rows(await gather(message.words, wire, tag=turn.tag), turn.form)
        if turn.is_meta:
            return
        state.weights[turn.index] = 1.0 + everyones.passed
        # One after another, not all at once: on a GPU too, all workers get the same bits.
        sums = (each.entries() for each in everyones.messages())
        turn.finish_(sums, everyones.tails(turn.residual).sum(0), wire.world_size)

    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        return gather_rounds(form.num_bytes, world_size)
