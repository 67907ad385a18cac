"""Collectives of messages, in the order of sums that Gloo has, so that they give the same bits.

Each starts at the worker that calls it: receives are posted at once, in the order in which workers issue
collectives. The result goes on with it, in the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thinwire.wire.ring import RING_BYTES
from thinwire.wire.waiters import Wait
from thinwire.wire.work import Work

_SEGMENT_BYTES = 1 << 20
_AHEAD = 4
"""Segments that a worker has room for before it has added them."""
_FIRST_TAG, _NUM_CALLS = (1 << 30) + (1 << 21), 1 << 20
"""First tag of collectives, and calls until tags repeat, at two tags each. Tags of exchanges are counted from
0; ring.py has those between."""


class Messages(Protocol):
    """Messages to and from the workers of one lane."""

    rank: int
    world_size: int

    def post_send(self, data: Tensor, to: int, tag: int) -> Work: ...

    def post_receive(self, data: Tensor, source: int | None, tag: int) -> Work: ...


def tags_of(number: int) -> tuple[int, int]:
    """The tags of the `number`-th collective of a lane: the next one may begin before it has ended."""
    tag = _FIRST_TAG + 2 * (number % _NUM_CALLS)
    return tag, tag + 1


def segments_of(data: Tensor, world_size: int) -> list[list[Tensor]]:
    """A flat tensor in parts for each worker, in segments each; the last ones may be empty. Cut as in Gloo's
    ring all-reduce: where a part begins says in which order its numbers are added."""
    item = data.element_size()
    most = item * max(1, _SEGMENT_BYTES // item)
    count = max(-(-data.nbytes // most), 2 * world_size)
    count = -(-count // world_size) * world_size
    length = -(-data.nbytes // (count * item))
    pieces = [data[at * length : (at + 1) * length] for at in range(count)]
    per_worker = count // world_size
    return [pieces[at : at + per_worker] for at in range(0, count, per_worker)]


def all_reduce(wire: Messages, number: int, data: Tensor) -> Wait:
    """All-reduce around a ring to the left: partial sums, then sums.

    Every worker sends and receives all the time.
    """
    rank, size = wire.rank, wire.world_size
    reduces, gathers = tags_of(number)
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = segments_of(data.detach().view(-1), size)
    # what comes here: partial sums of parts rank+2 .. rank+size, which is the own one; then the other sums
    arriving = [
        (part, at)
        for hop in range(2, size + 1)
        for part in [(rank + hop) % size]
        for at in range(len(parts[0]))
    ]
    arriving = [(part, at) for part, at in arriving if parts[part][at].numel()]
    inboxes = [torch.empty_like(parts[0][0]) for _ in range(min(_AHEAD, len(arriving)))]
    receives: list[Work] = []

    def post_next() -> None:
        number = len(receives)
        if number < len(arriving):
            part, at = arriving[number]
            inbox = inboxes[number % len(inboxes)][: parts[part][at].numel()]
            receives.append(wire.post_receive(inbox, right, reduces))

    for _ in inboxes:
        post_next()
    sums = [part for hop in range(1, size) for part in parts[(rank + hop) % size] if part.numel()]
    finals = [wire.post_receive(each, right, gathers) for each in sums]

    def go_around() -> None:
        sends = [wire.post_send(each, left, reduces) for each in parts[right] if each.numel()]
        for number, (part, at) in enumerate(arriving):
            receives[number].wait()
            own = parts[part][at]
            own += inboxes[number % len(inboxes)][: own.numel()]
            sends.append(wire.post_send(own, left, gathers if part == rank else reduces))
            post_next()
        last = len(sums) - sum(each.numel() > 0 for each in parts[left])
        for number, (each, receive) in enumerate(zip(sums, finals, strict=True)):
            receive.wait()
            if number < last:
                sends.append(wire.post_send(each, left, gathers))
        _wait_for(sends)

    return go_around


def all_gather(wire: Messages, number: int, data: Tensor, out: Tensor) -> Wait:
    """All-gather: small tensors directly to everybody, large ones around a ring."""
    rank, size = wire.rank, wire.world_size
    tag, _ = tags_of(number)
    parts, own = out.detach().view(size, -1), data.detach().view(-1)
    around = data.nbytes >= RING_BYTES
    hops = range(1, size)
    receives = [
        wire.post_receive(parts[(rank - hop) % size], (rank - (1 if around else hop)) % size, tag)
        for hop in hops
    ]

    def go_around() -> None:
        sends = [wire.post_send(own, (rank + hop) % size, tag) for hop in ([1] if around else hops)]
        parts[rank].copy_(own)
        for hop, receive in zip(hops, receives, strict=True):
            receive.wait()
            if around and hop < size - 1:
                sends.append(wire.post_send(parts[(rank - hop) % size], (rank + 1) % size, tag))
        _wait_for(sends)

    return go_around


def all_to_all(wire: Messages, number: int, data: Tensor, out: Tensor) -> Wait:
    rank, size = wire.rank, wire.world_size
    tag, _ = tags_of(number)
    own, parts = data.detach().view(size, -1), out.detach().view(size, -1)
    hops = range(1, size)
    works = [wire.post_receive(parts[(rank - hop) % size], (rank - hop) % size, tag) for hop in hops]

    def go() -> None:
        works.extend(wire.post_send(own[(rank + hop) % size], (rank + hop) % size, tag) for hop in hops)
        parts[rank].copy_(own[rank])
        _wait_for(works)

    return go


def broadcast(wire: Messages, number: int, data: Tensor, source: int) -> Wait:
    """Broadcast down a binomial tree; large tensors in segments, which a worker passes on as they come."""
    rank, size = wire.rank, wire.world_size
    tag, _ = tags_of(number)
    place, flat = (rank - source) % size, data.detach().view(-1)
    pieces = flat.split(max(1, _SEGMENT_BYTES // flat.element_size())) if flat.numel() else (flat,)
    parent = (place - (1 << (place.bit_length() - 1)) + source) % size if place else None
    receives = [wire.post_receive(piece, parent, tag) for piece in pieces] if parent is not None else []

    def go() -> None:
        sends = []
        for number, piece in enumerate(pieces):
            if receives:
                receives[number].wait()
            sends += [wire.post_send(piece, (child + source) % size, tag) for child in _children(place, size)]
        _wait_for(sends)

    return go


def _children(place: int, size: int) -> Iterator[int]:
    hop = 1 << place.bit_length()
    while place + hop < size:
        yield place + hop
        hop *= 2


def _wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()
