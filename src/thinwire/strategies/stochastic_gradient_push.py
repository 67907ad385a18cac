"""StochasticGradientPush: parameters go to one peer with half of their mass; nobody waits for anybody.

Every worker holds values z and a mass w, which begins as 1. To send is to give half of the mass away with a
copy of the values: a message is (z, w/2) and w/2 stays. To receive (z', v) is

    z += v / (w + v) * (z' - z);  w += v

so the sum of w z, and that of w, over workers and messages under way, never change, whoever sends to whom
and however late. If the payload shows z as q, then w/2 q has left, and what stays is 2 z - q with mass w/2.
Every chunk of a bucket has a mass of its own, since a round may send some of them only.

A worker takes the next message of a peer when its training has folded in the one before. So one that makes no
steps cannot draw in the others' mass, and keeps one sum per bucket; the others leave it out until it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from thinwire.compress.payload import Payload, bits
from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy, step_scale
from thinwire.strategies.gossip.chunks import Chunks, WindowPosition, chunk_size
from thinwire.strategies.gossip.encoding import Encoding, RoundingMemory
from thinwire.strategies.gossip.state import SAMPLE_EVERY, distance_from_mean
from thinwire.strategies.parts import check_finite, check_real
from thinwire.strategies.settings import check_types
from thinwire.topology import Schedule, Topology
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, in_background, training_thread

LEAST_MASS = 1 / 16
"""Mass below which a worker sends none until it hears from others: its steps would soon count for nothing."""
PATIENCE = 16
"""Rounds in which a message holds back all others of its bucket: on a slow path, several at a time would make
each of them later. One that takes longer waits for its peer, and only that peer gets nothing meanwhile."""
_HEAD = 5
"""Numbers before the masses: bucket, steps of the sender, first chunk, number of chunks, payload."""
_PAYLOADS: tuple[Payload, ...] = get_args(Payload)


@dataclass(slots=True)
class _Arrival:
    """Messages for a bucket that are not folded in yet: one, or the weighted mean of several."""

    values: Tensor
    """Values of the whole bucket; those of chunks that have not come mean nothing."""
    masses: list[float]
    """Mass of each chunk, zero for those that have not come."""
    sent: list[tuple[int, int]]
    """Sender of every message, and its step at that time."""


@dataclass(slots=True)
class _Channel:
    """One bucket's messages under way; not saved."""

    chunks: Chunks
    like: Tensor
    outgoing: dict[int, tuple[int, Work]] = field(default_factory=dict)
    """Messages that peers have not taken yet: the step each was sent in, and the work, by peer."""
    arrived: list[_Arrival] = field(default_factory=list)
    """The messages not folded in yet: at most one entry, however long the training thread takes."""

    def add(self, new: _Arrival) -> None:
        """Called by one thread, beside training."""
        with suppress(IndexError):  # nothing waits, or training has just taken it
            old = self.arrived.pop()
            masses = [sum(pair) for pair in zip(old.masses, new.masses, strict=True)]
            old.values.lerp_(new.values, self.weight(new.masses, masses, old.values))
            new = _Arrival(old.values, masses, old.sent + new.sent)
        self.arrived.append(new)

    def take(self) -> _Arrival | None:
        """Hand over what has come to the caller."""
        try:
            return self.arrived.pop()
        except IndexError:
            return None

    def weight(self, new: Sequence[float], all_: Sequence[float], like: Tensor) -> float | Tensor:
        """How much of each parameter's mass is new: one number, if it is the same for all chunks."""
        weights = [mass / total if mass else 0.0 for mass, total in zip(new, all_, strict=True)]
        if all(weight == weights[0] for weight in weights):
            return weights[0]
        flat = torch.empty_like(like)
        for chunk, weight in zip(self.chunks.chunks, weights, strict=True):
            flat[chunk.start : chunk.stop] = weight
        return flat


@dataclass(slots=True)
class PushState:
    """One worker's state; lists are in the order of buckets."""

    memory: RoundingMemory
    masses: list[list[float]]
    """Masses by bucket and chunk."""
    positions: list[WindowPosition]
    late_rounds: int = 0
    """Messages from a sender that had done fewer steps."""
    skipped_rounds: int = 0
    """Rounds that sent nothing, as a message was still on its way or too little mass was left."""
    distance: float = 0.0
    channels: list[_Channel] = field(init=False, repr=False)
    schedule: Schedule = field(init=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StochasticGradientPush(Strategy):
    """Push-sum gossip: send to one peer per step, take messages from whoever sends, wait for nobody.

    Slow and fast workers, late messages and skipped rounds keep the weighted mean of all models. Two runs are
    not the same bits, since what is folded in depends on what has arrived.

    Reference: Assran et al., Stochastic Gradient Push, 2019, arXiv:1811.10792.
    """

    topology: Topology = "dissemination"
    """Who meets whom: "dissemination" (any number of workers) or "hypercube" (a power of two)."""
    rotate: int | None = 0
    """Seed of the random order in which workers change places every log2(P) rounds; none: they never do."""
    payload: Payload = "fp32"
    """How numbers look on the wire: "fp32" (as they are), "bf16" (half the bytes) or "int8" (a quarter)."""
    share: float = 1.0
    """Part of the model that each round sends, in turn."""

    def __post_init__(self) -> None:
        check_types(self)
        valid = 0 < self.share <= 1
        check(valid, "StochasticGradientPush.share", "a number above 0 and at most 1", self.share)

    def rate_scale(self, state: PushState, world_size: int, normalised: bool) -> float:
        return step_scale(world_size, normalised, 1 / self.share)

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> PushState:
        check_real(buckets, "StochasticGradientPush")
        memory = RoundingMemory([], [])  # rounding errors stay in the parameters
        if self.payload == "int8":
            memory.references = [
                b.keep("reference", b.read(), on_resize="same", of_parameters=True) for b in buckets
            ]
        size = chunk_size([bucket.num_parameters for bucket in buckets])
        chunks = [Chunks([bucket.num_parameters], size) for bucket in buckets]
        state = PushState(memory, [[1.0] * len(each) for each in chunks], [WindowPosition() for _ in buckets])
        state.channels = [
            _Channel(each, b.read()[:1].clone()) for each, b in zip(chunks, buckets, strict=True)
        ]
        state.schedule = Schedule(self.topology, wire.world_size, self.rotate)
        return state

    async def mix(self, bucket: Bucket, state: PushState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        step = bucket.step
        await in_background()
        flat = check_finite(bucket.read(), bucket)  # nothing changes it before this has come back
        peer = self._next_peer(bucket.index, step, state, wire.rank)
        state.skipped_rounds += peer is None
        rest = None if peer is None else self._send(flat, bucket, step, peer, state, wire)
        await training_thread()
        if rest is not None:
            bucket.add_(rest)
        self._fold(bucket, step, state, wire)

    def _next_peer(self, index: int, step: int, state: PushState, rank: int) -> int | None:
        """The peer this round sends to, if any."""
        channel, masses, position = state.channels[index], state.masses[index], state.positions[index]
        for _, work in channel.outgoing.values():
            if work.error is not None:
                raise work.error
        channel.outgoing = {to: sent for to, sent in channel.outgoing.items() if not sent[1].done()}
        count = channel.chunks.count(self.share)
        enough = min(masses[(position.chunk + i) % len(masses)] for i in range(count)) >= LEAST_MASS
        if not enough or any(step < sent_in + PATIENCE for sent_in, _ in channel.outgoing.values()):
            return None
        peer = state.schedule.peers(rank, position.number).to
        if peer in channel.outgoing:
            position.leave_out()
            return None
        return peer

    def _send(
        self, flat: Tensor, bucket: Bucket, step: int, peer: int, state: PushState, wire: Wire
    ) -> Tensor | None:
        """Send a part of a bucket with half of its mass; gives what the payload could not show."""
        index, channel = bucket.index, state.channels[bucket.index]
        count, first = channel.chunks.count(self.share), state.positions[index].chunk
        window = channel.chunks.window(state.positions[index], count)
        masses = state.masses[index]
        if not channel.like.is_meta:  # sizes alone bring no mass back
            for chunk in window.chunks:
                masses[chunk] /= 2
        encoding = Encoding(window.spans[0], flat.element_size(), self.payload, 0)
        own = [flat[part.start : part.stop] for part in encoding.parts]
        body, sent = encoding.write(index, own, state.memory)
        numbers = [index, step, first, count, _PAYLOADS.index(self.payload)]
        head = torch.tensor([*numbers, *(masses[chunk] for chunk in window.chunks)], dtype=torch.float64)
        message = torch.cat([head.view(torch.uint8).to(body.device), body])
        channel.outgoing[peer] = step, wire.send(message, to=peer, tag=index)
        if self.payload == "fp32":
            return None
        rest = [mine - shown for mine, shown in zip(own, sent, strict=True)]
        return encoding.spread(rest, bucket.num_parameters)

    async def serve(self, state: PushState, wire: Wire) -> None:
        device = "meta" if state.channels[0].like.is_meta else "cpu"  # where messages are taken apart
        like = torch.empty(0, dtype=torch.uint8, device=device)
        async for source, tag, message in wire.listen(like, holds=True):
            if message.is_meta:
                wire.release(source=source, tag=tag)
                continue  # sizes alone, without numbers
            head = message[: 8 * _HEAD].view(torch.float64).tolist()
            index, step, first, count, payload = (int(number) for number in head)
            channel = state.channels[index]
            window = channel.chunks.window(WindowPosition(first), count)
            body_at = 8 * (_HEAD + count)
            came = message[8 * _HEAD : body_at].view(torch.float64).tolist()
            masses = [0.0] * len(channel.chunks)
            for chunk, mass in zip(window.chunks, came, strict=True):
                masses[chunk] = mass
            like = channel.like
            encoding = Encoding(window.spans[0], like.element_size(), _PAYLOADS[payload], 0)
            likes = [like.expand(part.stop - part.start) for part in encoding.parts]
            parts = encoding.read(index, message[body_at:].to(like.device), likes, state.memory)
            values = encoding.spread(parts, channel.chunks.chunks[-1].stop)
            channel.add(_Arrival(values, masses, [(source, step)]))

    def _fold(self, bucket: Bucket, step: int, state: PushState, wire: Wire) -> None:
        """Move a bucket towards the values that have come for it."""
        channel, masses = state.channels[bucket.index], state.masses[bucket.index]
        arrival = channel.take()
        if arrival is None:
            return
        masses[:] = [sum(pair) for pair in zip(masses, arrival.masses, strict=True)]
        if step % SAMPLE_EVERY == 0:
            self._sample(bucket, arrival, state)
        bucket.lerp_(arrival.values, channel.weight(arrival.masses, masses, arrival.values))
        for source, sent_in in arrival.sent:
            state.late_rounds += sent_in < step
            wire.release(source=source, tag=bucket.index)

    def _sample(self, bucket: Bucket, arrival: _Arrival, state: PushState) -> None:
        own, chunks = bucket.read(), state.channels[bucket.index].chunks.chunks
        came = [chunk for chunk, mass in zip(chunks, arrival.masses, strict=True) if mass]
        if len(came) == len(chunks):
            came = [replace(chunks[0], stop=chunks[-1].stop)]
        parts = [(arrival.values[c.start : c.stop], own[c.start : c.stop]) for c in came]
        apart = sum(float((theirs - mine).square().sum()) for theirs, mine in parts)
        norm = sum(float(theirs.square().sum()) for theirs, _ in parts)
        if norm > 0:
            state.distance = distance_from_mean(apart, norm, state.schedule.world_size)

    async def settle(self, buckets: Sequence[Bucket], state: PushState, wire: Wire) -> None:
        for bucket in buckets:
            self._fold(bucket, bucket.step, state, wire)

    def instruments(self, state: PushState) -> Mapping[str, float]:
        masses = [mass for each in state.masses for mass in each]
        return {
            "share": self.share,
            "payload_bits": bits(self.payload),
            "late_rounds": state.late_rounds,
            "skipped_rounds": state.skipped_rounds,
            "mass": math.fsum(masses) / len(masses),
            "consensus_distance": state.distance,
        }
