"""OkTopK: large gradients go to the owner of their index, who adds them up and tells everyone the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.compress.layout import SparseLayout
from thinwire.strategies.base import Strategy
from thinwire.strategies.sparse.base import DIVIDE_EVERY, SparseStrategy
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.state import SparseState
from thinwire.strategies.sparse.turn import Message, Turn, messages
from thinwire.traffic import Round
from thinwire.wire.base import Wire, take_off

if TYPE_CHECKING:
    from thinwire.compress.sparse import Sparse


@dataclass(frozen=True, kw_only=True, slots=True)
class OkTopK(SparseStrategy):
    """Have every index owned by one worker: below 6k words per worker, however many workers there are.

    The indices of a bucket are cut into P regions, one for each worker. With a = gradient + residual, every
    worker sends the k largest of its a to the owners of their regions. An owner adds up what it gets and
    sends the k/P largest sums to everyone; the step is made with these, divided by P. No gradient is lost:
    an index is applied with all that its owner has got, or every worker keeps what it has sent of it.

    Reference: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022,
    arXiv:2201.07598.
    """

    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        size = wire.world_size
        to_owner, from_owner = _forms(turn.form, size)
        parcels, inbox, everyones = (
            turn.new_words(size * each.num_words) for each in (to_owner, to_owner, from_owner)
        )
        sent = [] if turn.is_meta else self._hand_out_(messages(parcels, to_owner), message, turn, state)
        await wire.all_to_all(parcels, inbox)
        await take_off()  # so that buckets go on in their order, whoever finds its parcels there already
        result = Message(turn.new_words(from_owner.num_words), from_owner)
        if not turn.is_meta:
            self._add_up_(result, messages(inbox, to_owner), turn)
        await state.fixed.lane.all_gather(result.words, everyones)
        if not turn.is_meta:
            self._take_in(messages(everyones, from_owner), sent, turn, state)

    def _hand_out_(
        self, parcels: list[Message], message: Message, turn: Turn, state: SparseState
    ) -> list[Sparse]:
        """Fill a parcel for every owner; the entries in each of them."""
        from thinwire.compress.regions import split

        regions = split(message.entries(), state.regions[turn.index])
        room, surplus = parcels[0].form.layout.capacity, message.passed - message.count
        tail = turn.tail.split(max(1, parcels[0].form.tail))
        sent = []
        for owner, (parcel, entries) in enumerate(zip(parcels, regions, strict=True)):
            fitting, over = (type(entries)(*(t[part] for t in entries)) for part in _cut(room))
            turn.give_back_(over)
            parcel.write_(fitting, len(entries.index) + (surplus if owner == 0 else 0))
            if owner < len(tail):
                parcel.tail(turn.residual)[: tail[owner].numel()] = tail[owner]
            sent.append(fitting)
        return sent

    def _add_up_(self, result: Message, parcels: list[Message], turn: Turn) -> None:
        """As the owner of a region: its largest sums, and a part of the tail."""
        from thinwire.compress.sparse import Sparse, empty_sparse, keep_largest, merge

        sums, tail = empty_sparse(turn.residual), result.tail(turn.residual)
        for parcel in parcels:
            sums = merge(sums, parcel.entries())
            tail.add_(parcel.tail(tail))
        kept, _ = keep_largest(sums, result.form.layout.capacity)
        result.write_(kept, sum(parcel.passed for parcel in parcels))
        if self.values == "bf16":
            turn.give_back_(Sparse(kept.index, kept.value - result.entries().value))

    def _take_in(
        self, results: list[Message], sent: Sequence[Sparse], turn: Turn, state: SparseState
    ) -> None:
        """What all owners say is the step; keep what they did not take."""
        from thinwire.compress.regions import even_starts
        from thinwire.compress.sparse import without

        sums = [result.entries() for result in results]
        for own, region in zip(sent, sums, strict=True):
            turn.give_back_(without(own, region.index))
        parts = [result.tail(turn.residual) for result in results]
        tail = turn.residual.new_zeros(len(parts) * parts[0].numel())
        for place, part in zip(tail.split(max(1, parts[0].numel())), parts, strict=False):
            place.copy_(part)
        turn.finish_(sums, tail[: turn.tail.numel()], len(results))
        state.passed[turn.index] += sum(result.passed for result in results)
        if state.step % DIVIDE_EVERY == 0:
            before, now = state.regions[turn.index], even_starts(sums)
            if now:  # half the way: one step is only a sample
                state.regions[turn.index] = [(a + b) // 2 for a, b in zip(before, now, strict=True)]

    def first_regions(self, numel: int, world_size: int) -> list[int]:
        return [numel * owner // world_size for owner in range(world_size)]

    def quantum(self, world_size: int) -> int:
        return 8 * world_size

    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        to_owner, from_owner = _forms(form, world_size)
        yield Round(op="all_to_all", send_bytes=world_size * to_owner.num_bytes)
        yield Round(op="all_gather", send_bytes=from_owner.num_bytes)

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


def _cut(room: int) -> tuple[slice, slice]:
    return slice(room), slice(room, None)
