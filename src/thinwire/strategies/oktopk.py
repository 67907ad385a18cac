"""OkTopK: large gradients go to the owner of their index, who adds them up and tells everyone the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.compress.layout import PASSED, SparseLayout
from thinwire.strategies.base import Strategy
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.gather import gather, gather_rounds
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import Message, Rows, Turn
from thinwire.traffic import Round
from thinwire.wire.base import Wire

if TYPE_CHECKING:
    from thinwire.compress.sparse import Sparse

MOVE_EVERY = 16
"""Steps after which the borders of regions move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OkTopK(SparseStrategy):
    """Have one worker own each index: a worker sends as many bytes however many workers there are.

    The indices of a bucket are cut into P regions, one for each worker. With a = gradient + residual, every
    worker sends the k largest of its a to the owners of their regions. An owner adds up what it gets and
    sends the k/P largest sums to everyone; the step is made with these, divided by P. That is below 6k words
    where k is at least 20 P. No gradient is lost: an index is applied with all that its owner has got, or
    every worker keeps what it has sent of it.

    Reference: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022,
    arXiv:2201.07598.
    """

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        to_owner, from_owner = _forms(turn.form, wire.world_size)
        parcels, inbox = Rows.new(turn, to_owner, wire.world_size), Rows.new(turn, to_owner, wire.world_size)
        sent = None if turn.is_meta else self._deal_(parcels, message, turn, state)
        await wire.all_to_all(parcels.words, inbox.words)
        result = Rows.new(turn, from_owner, 1)
        if not turn.is_meta:
            self._add_up_(result, inbox, turn)
        results = Rows(await gather(result.words, wire, tag=turn.tag), from_owner)
        if sent is not None:
            self._take_in(results, sent, turn, state)

    def _deal_(self, parcels: Rows, message: Message, turn: Turn, state: SparseState) -> Sparse:
        """Fill a parcel for every owner, and give back what has no room; the entries that have."""
        from thinwire.compress.regions import deal_

        fitting, over = deal_(parcels.rows, parcels.form.layout, message.entries(), state.regions[turn.index])
        parcels.rows[0, PASSED] += message.passed - message.count
        turn.give_back_(over)
        parcels.write_tail_(message.tail(turn.residual))
        return fitting

    def _add_up_(self, result: Rows, parcels: Rows, turn: Turn) -> None:
        """As the owner of a region: its largest sums, and a part of the tail."""
        from thinwire.compress.regions import add_up, collect
        from thinwire.compress.sparse import Sparse, keep_largest

        message, layout = Message(result.words, result.form), result.form.layout
        kept, _ = keep_largest(add_up(collect(parcels.rows, parcels.form.layout)), layout.capacity)
        message.write_(kept, parcels.passed)
        message.tail(turn.residual).copy_(parcels.tails(turn.residual).sum(0))
        if self.payload == "bf16":
            turn.give_back_(Sparse(kept.index, kept.value - message.entries().value))

    def _take_in(self, results: Rows, sent: Sparse, turn: Turn, state: SparseState) -> None:
        """What all owners say is the step; keep what they did not take."""
        from thinwire.compress.regions import collect, even_starts
        from thinwire.compress.sparse import without

        sums, world_size = collect(results.rows, results.form.layout), len(results.rows)
        turn.give_back_(without(sent, sums.index))
        tail = results.tails(turn.residual).reshape(-1)[: turn.tail.numel()]
        turn.finish_([sums], tail, world_size)
        state.weights[turn.index] = 1.0 + results.passed
        if state.step % MOVE_EVERY == 0:
            before, now = state.regions[turn.index], even_starts(sums.index, world_size)
            if now:  # half the way: one step is only a sample
                state.regions[turn.index] = [(a + b) // 2 for a, b in zip(before, now, strict=True)]

    def first_regions(self, numel: int, world_size: int) -> list[int]:
        return [numel * owner // world_size for owner in range(world_size)]

    def quantum(self, world_size: int) -> int:
        return (4 if self.payload == "fp32" else 8) * world_size  # so that no message needs padding

    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        to_owner, from_owner = _forms(form, world_size)
        yield Round(op="all_to_all", send_bytes=world_size * to_owner.num_bytes)
        yield from gather_rounds(from_owner.num_bytes, world_size)

    def resize(self, saved: Sequence[Any], rank: int, world_size: int) -> Any:
        """As ever, and regions are as at first: with other owners they are others."""
        state = Strategy.resize(self, saved, rank, world_size)
        regions = [self.first_regions(each.numel(), world_size) for each in state["residuals"]]
        return {**state, "regions": regions}


def _forms(form: Form, world_size: int) -> tuple[Form, Form]:
    """What goes to an owner, with half as much room again since regions are never filled evenly, and what
    comes from it; each with a part of the tail."""
    tail = -(-form.tail // world_size)
    room = form.layout.capacity // world_size

    def of(capacity: int) -> Form:
        layout = SparseLayout(capacity=capacity, values=form.layout.values, itemsize=form.layout.itemsize)
        return Form(layout=layout, tail=tail)

    return of(room + room // 2), of(room)
