"""OkTopK: large gradients go to the owner of their index, who adds them up and tells everyone the largest."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress import sparse
from thinwire.compress.sparse import PASSED, Sparse, SparseLayout, keep_largest, without
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.plan import MessageFormat
from thinwire.strategies.sparse.reduction import Message, MessageRows, Reduction, gather
from thinwire.strategies.sparse.state import SparseState
from thinwire.wire.wire import Wire

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

    async def share(self, reduction: Reduction, message: Message, state: SparseState, wire: Wire) -> None:
        to_owner, from_owner = _formats(reduction.format, wire.world_size)
        num_words = wire.world_size * to_owner.num_words
        parcels, inbox = (MessageRows(reduction.new_words(num_words), to_owner) for _ in range(2))
        sent = None if reduction.is_meta else self._deal_(parcels, message, reduction, state)
        await wire.all_to_all(parcels.words, inbox.words)
        result = Message(reduction.new_words(from_owner.num_words), from_owner)
        if not reduction.is_meta:
            self._add_up_(result, inbox, reduction)
        results = MessageRows(await gather(result.words, wire, tag=reduction.tag), from_owner)
        if sent is not None:
            self._apply(results, sent, reduction, state)

    def _deal_(
        self, parcels: MessageRows, message: Message, reduction: Reduction, state: SparseState
    ) -> Sparse:
        """Fill a parcel for every owner, and give back what does not fit; gives the entries that do."""
        layout, regions = parcels.format.layout, state.regions[reduction.index]
        fitting, over = sparse.deal_(parcels.rows, layout, message.entries(), regions)
        parcels.rows[0, PASSED] += message.passed - message.count
        reduction.give_back_(over)
        parcels.write_tail_(message.tail)
        return fitting

    def _add_up_(self, message: Message, parcels: MessageRows, reduction: Reduction) -> None:
        """As the owner of a region: its largest sums, and a part of the tail."""
        sums = sparse.add_up(sparse.collect(parcels.rows, parcels.format.layout))
        kept, _ = keep_largest(sums, message.format.layout.capacity)
        message.write_(kept, parcels.passed)
        message.tail.copy_(parcels.tails.sum(0))
        if self.payload == "bf16":
            reduction.give_back_(Sparse(kept.index, kept.value - message.entries().value))

    def _apply(self, results: MessageRows, sent: Sparse, reduction: Reduction, state: SparseState) -> None:
        """Step with the sums of all owners; keep the entries they did not take."""
        sums, world_size = sparse.collect(results.rows, results.format.layout), len(results.rows)
        reduction.give_back_(without(sent, sums.index))
        tail = results.tails.reshape(-1)[: reduction.tail.numel()]
        reduction.finish_([sums], tail, world_size)
        state.weights[reduction.index] = 1.0 + results.passed
        if (state.runtime.buckets[reduction.index].step - 1) % MOVE_EVERY == 0:
            before, now = state.regions[reduction.index], sparse.even_starts(sums.index, world_size)
            if now:  # half the way: one step is only a sample
                state.regions[reduction.index] = [(a + b) // 2 for a, b in zip(before, now, strict=True)]

    @property
    def num_buckets(self) -> int:
        return 4  # a message to every owner and log2(P) exchanges for each

    def first_regions(self, numel: int, world_size: int) -> list[int]:
        return [numel * owner // world_size for owner in range(world_size)]

    def quantum(self, world_size: int) -> int:
        return (4 if self.payload == "fp32" else 8) * world_size  # so that no message needs padding

    def sent_bytes(self, format: MessageFormat, world_size: int) -> int:
        to_owner, from_owner = _formats(format, world_size)
        return (world_size - 1) * (to_owner.num_bytes + from_owner.num_bytes)


def _formats(format: MessageFormat, world_size: int) -> tuple[MessageFormat, MessageFormat]:
    """Messages to an owner, with half as much capacity again since regions are never filled evenly, and from
    it; each with a part of the tail."""
    tail = -(-format.tail // world_size)
    capacity = format.layout.capacity // world_size

    def of(capacity: int) -> MessageFormat:
        layout = SparseLayout(capacity=capacity, values=format.layout.values, itemsize=format.layout.itemsize)
        return MessageFormat(layout=layout, tail=tail)

    return of(capacity + capacity // 2), of(capacity)
