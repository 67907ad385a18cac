"""StochasticGradientPush: parameters go to one peer with half of their mass; nobody waits for anybody.

Every worker holds values z and a mass w, which begins as 1. To send is to give half of the mass away with a
copy of the values: a message is (z, w/2) and w/2 stays. To receive (z', v) is

    z += v / (w + v) * (z' - z);  w += v

so the sum of w z, and that of w, over workers and messages under way, never change, whoever sends to whom
and however late. If the payload shows z as q, then w/2 q has left, and what stays is 2 z - q with mass w/2.
Every chunk of a bucket has a mass of its own, since a round may send some of them only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from thinwire.compress.payload import Payload, bits
from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.gossip.chunks import Chunks, Window, WindowPosition, chunk_size
from thinwire.strategies.gossip.encoding import Encoding, RoundingMemory
from thinwire.strategies.gossip.state import SAMPLE_EVERY, distance_from_mean
from thinwire.strategies.parts import check_finite, check_real
from thinwire.strategies.settings import check_types
from thinwire.topology import Schedule, Topology
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, finished, in_background, training_thread

LEAST_MASS = 1 / 16
"""A worker with less keeps it until it hears from others: its own steps would soon count for nothing."""
_HEAD = 5
"""Numbers before the masses: bucket, steps of the sender, first chunk, number of chunks, payload."""
_PAYLOADS: tuple[Payload, ...] = get_args(Payload)


@dataclass(slots=True)
class _Arrival:
    """A message that has come and is not folded in yet."""

    step: int
    """The sender's, when it sent it."""
    window: Window
    masses: list[float]
    encoding: Encoding
    parts: list[Tensor]


@dataclass(slots=True)
class _Channel:
    """What one bucket has on the wire; not saved."""

    chunks: Chunks
    like: Tensor
    outgoing: Work = field(default_factory=finished)
    arrived: list[_Arrival] = field(default_factory=list)


@dataclass(slots=True)
class PushState:
    """One worker's state; lists are in the order of buckets."""

    memory: RoundingMemory
    masses: list[list[float]]
    """By bucket and chunk."""
    positions: list[WindowPosition]
    late_rounds: int = 0
    """Messages from a sender that had done fewer steps."""
    skipped_rounds: int = 0
    """Rounds that sent nothing, because the last message was still on its way or too little mass was left."""
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

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> PushState:
        check_real(buckets, "StochasticGradientPush")
        memory = RoundingMemory([], [])  # rounding errors stay in the parameters
        if self.payload == "int8":
            memory.references = [b.keep("reference", b.read(), on_resize="same") for b in buckets]
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
        step, channel = bucket.step, state.channels[bucket.index]
        if channel.outgoing.error is not None:
            raise channel.outgoing.error
        await in_background()
        sends = self._may_send(bucket.index, state)
        state.skipped_rounds += not sends
        rest = self._send(bucket, step, state, wire) if sends else None
        await training_thread()
        if rest is not None:
            bucket.add_(rest)
        self._fold(bucket, step, state)

    def _may_send(self, index: int, state: PushState) -> bool:
        channel, masses = state.channels[index], state.masses[index]
        count, first = channel.chunks.count(self.share), state.positions[index].chunk
        enough = min(masses[(first + i) % len(masses)] for i in range(count)) >= LEAST_MASS
        return channel.outgoing.done() and enough

    def _send(self, bucket: Bucket, step: int, state: PushState, wire: Wire) -> Tensor | None:
        """Send a part of a bucket with half of its mass; gives what the payload could not show."""
        index, channel = bucket.index, state.channels[bucket.index]
        count, first = channel.chunks.count(self.share), state.positions[index].chunk
        window = channel.chunks.window(state.positions[index], count)
        masses = state.masses[index]
        if not channel.like.is_meta:  # sizes alone bring no mass back
            for chunk in window.chunks:
                masses[chunk] /= 2
        flat = check_finite(bucket.read(), bucket)  # nothing changes it before this has come back
        encoding = Encoding(window.spans[0], flat.element_size(), self.payload, 0)
        body, sent = encoding.write(index, [flat], state.memory)
        numbers = [index, step, first, count, _PAYLOADS.index(self.payload)]
        head = torch.tensor([*numbers, *(masses[chunk] for chunk in window.chunks)], dtype=torch.float64)
        message = torch.cat([head.view(torch.uint8).to(body.device), body])
        peer = state.schedule.peers(wire.rank, window.number).to
        channel.outgoing = wire.send(message, to=peer)
        if self.payload == "fp32":
            return None
        rest = [flat[part.start : part.stop] - data for part, data in zip(encoding.parts, sent, strict=True)]
        return encoding.spread(rest, 0, bucket.num_parameters)

    async def serve(self, state: PushState, wire: Wire) -> None:
        device = "meta" if state.channels[0].like.is_meta else "cpu"  # where messages are taken apart
        async for _, _, message in wire.listen(torch.empty(0, dtype=torch.uint8, device=device)):
            if message.is_meta:
                continue  # sizes alone, without numbers
            head = message[: 8 * _HEAD].view(torch.float64).tolist()
            index, step, first, count, payload = (int(number) for number in head)
            channel = state.channels[index]
            window = channel.chunks.window(WindowPosition(first), count)
            body_at = 8 * (_HEAD + count)
            masses = message[8 * _HEAD : body_at].view(torch.float64).tolist()
            like = channel.like
            encoding = Encoding(window.spans[0], like.element_size(), _PAYLOADS[payload], 0)
            likes = [like.expand(part.stop - part.start) for part in encoding.parts]
            parts = encoding.read(index, message[body_at:].to(like.device), likes, state.memory)
            channel.arrived.append(_Arrival(step, window, masses, encoding, parts))

    def _fold(self, bucket: Bucket, step: int, state: PushState) -> None:
        """Move a bucket towards every message that has come for it."""
        channel, masses = state.channels[bucket.index], state.masses[bucket.index]
        while channel.arrived:
            arrival = channel.arrived.pop(0)
            state.late_rounds += arrival.step < step
            weights = []
            for chunk, mass in zip(arrival.window.chunks, arrival.masses, strict=True):
                masses[chunk] += mass
                weights.append(mass / masses[chunk])
            theirs = arrival.encoding.spread(arrival.parts, 0, bucket.num_parameters)
            if step % SAMPLE_EVERY == 0:
                self._sample(bucket, arrival, state)
            bucket.lerp_(theirs, _weight(bucket, channel.chunks, arrival, weights))

    def _sample(self, bucket: Bucket, arrival: _Arrival, state: PushState) -> None:
        own = bucket.read()
        parts = list(zip(arrival.encoding.parts, arrival.parts, strict=True))
        apart = sum(float((theirs - own[p.start : p.stop]).square().sum()) for p, theirs in parts)
        norm = sum(float(theirs.square().sum()) for _, theirs in parts)
        if norm > 0:
            state.distance = distance_from_mean(apart, norm, state.schedule.world_size)

    async def settle(self, buckets: Sequence[Bucket], state: PushState, wire: Wire) -> None:
        for bucket in buckets:
            self._fold(bucket, bucket.step, state)

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


def _weight(bucket: Bucket, chunks: Chunks, arrival: _Arrival, weights: list[float]) -> float | Tensor:
    """How far each parameter of a bucket moves: one number, if it is the same for all."""
    whole = len(arrival.window.chunks) == len(chunks)
    if whole and all(weight == weights[0] for weight in weights):
        return weights[0]
    flat = arrival.parts[0].new_zeros(bucket.num_parameters)
    for index, weight in zip(arrival.window.chunks, weights, strict=True):
        chunk = chunks.chunks[index]
        flat[chunk.start : chunk.stop] = weight
    return flat
