"""LocalStrategy: workers make steps of their own, and what these changed since a common anchor is shared.

Every worker holds the same anchor. When a part of the model is due, what local steps have changed in it is
averaged over workers, an outer step moves the anchor by that mean, and workers go on from there. Strategies
of this family say when and which part (`period`, `cut`), how it looks on the wire (`codec`), among whom
(`share_`), and what the outer step is (`outer`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from thinwire.compress.codec import Codec
from thinwire.strategies.base import SAME, Bucket, Strategy
from thinwire.strategies.local.fragments import Fragments, Span
from thinwire.strategies.local.reduction import encoded_mean_, mean_
from thinwire.strategies.local.tuner import IntervalTuner
from thinwire.strategies.parts import check_finite, check_real
from thinwire.wire.wire import Wire
from thinwire.wire.work import in_background, training_thread

SAMPLE_EVERY = 17
"""Steps after which the distance from the mean is measured; prime, so that all fragments have their turn."""


class Outer(NamedTuple):
    """The outer step: v = momentum v + moved;  anchor += rate (moved + momentum v), as torch's SGD with
    nesterov=True makes it of a gradient."""

    rate: float = 1.0
    momentum: float = 0.0

    def step_(self, anchor: Tensor, moved: Tensor, velocity: Tensor | None) -> None:
        anchor.add_(moved, alpha=self.rate)
        if velocity is not None:
            velocity.mul_(self.momentum).add_(moved)
            anchor.add_(velocity, alpha=self.rate * self.momentum)


@dataclass(slots=True)
class LocalState:
    """One worker's state; lists are in the order of buckets."""

    anchors: list[Tensor]
    """The parameters all workers last had in common; with a peer only, this worker's part in that."""
    velocities: list[Tensor]
    """Of the outer step; empty if it has no momentum."""
    residuals: list[Tensor]
    """Changes that were not shown to others yet; empty without a codec."""
    interval: int = field(metadata=SAME)
    """Steps after which a part is due again."""
    origin: int = field(default=0, metadata=SAME)
    """The step from which these intervals are counted."""
    distance: float = 0.0
    """How far this worker was from the mean when parts were last synchronized, relative to their size."""
    fragments: Fragments = field(init=False, repr=False)
    tuner: IntervalTuner | None = field(init=False, repr=False, default=None)

    def due(self, bucket: Bucket) -> list[Span]:
        """The parts of a bucket to synchronize now."""
        return self.fragments.due(bucket.index, bucket.step - self.origin, self.interval)

    def note_distance(self, apart: float, size: float) -> None:
        """From squares; an average over about the last ten parts."""
        if size > 0:
            self.distance += 0.1 * (math.sqrt(max(0.0, apart) / size) - self.distance)


class LocalStrategy(Strategy):
    """Everything that strategies with local steps have in common."""

    # -- what each of them says ---------------------------------------------------------------------

    @property
    @abstractmethod
    def period(self) -> int:
        """Steps after which a part of the model is due again."""

    def cut(self, numels: Sequence[int]) -> Fragments:
        """The parts that buckets with so many numbers are synchronized in; all at once unless said
        otherwise."""
        return Fragments(numels)

    def outer(self, world_size: int) -> Outer:
        """The outer step; plain averaging unless said otherwise."""
        return Outer()

    @property
    def codec(self) -> Codec | None:
        """How changes look on the wire; None: as they are."""
        return None

    @property
    def delay(self) -> int:
        """Steps after which a part is brought back; 0: training waits for it."""
        return 0

    async def share_(self, moved: Tensor, bucket: Bucket, start: int, state: LocalState, wire: Wire) -> None:
        """Overwrite what changed in a bucket from `start` on with its mean over workers, the same bits on
        all. Small tensors travel as they are."""
        codec = self.codec
        border = min(max(bucket.exact_from - start, 0), moved.numel()) if codec is not None else 0
        if border < moved.numel():
            await mean_(moved[border:], wire)
        if codec is not None and border:
            residual = state.residuals[bucket.index][start : start + border]
            await encoded_mean_(moved[:border], residual, codec, wire)

    # -- the protocol -------------------------------------------------------------------------------

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LocalState:
        check_real(buckets, type(self).__name__)
        anchors = [bucket.zeros("anchor", on_resize="same", of_parameters=True) for bucket in buckets]
        for anchor, bucket in zip(anchors, buckets, strict=True):
            anchor.copy_(bucket.read())
        velocities, residuals = list[Tensor](), list[Tensor]()
        if self.outer(wire.world_size).momentum:
            velocities = [bucket.zeros("velocity", on_resize="same") for bucket in buckets]
        if self.codec is not None:
            residuals = [bucket.zeros("residual", on_resize="sum", part="large") for bucket in buckets]
        state = LocalState(anchors, velocities, residuals, self.period)
        state.fragments = self.cut([bucket.num_parameters for bucket in buckets])
        return state

    async def mix(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        outer = self.outer(wire.world_size)
        if wire.world_size == 1 and outer == Outer():
            return
        spans = state.due(bucket)
        if not spans:
            return
        if state.tuner is not None:
            await state.tuner.begin(bucket, state, wire)
        now = check_finite(bucket.read(), bucket)
        if self.delay:
            await in_background(due=self.delay)
        anchor, target = state.anchors[bucket.index], now.clone()
        velocity = state.velocities[bucket.index] if state.velocities else None
        for start, stop in spans:
            span = slice(start, stop)
            moved = now[span] - anchor[span]
            sampled = bucket.step % SAMPLE_EVERY == 0 and not moved.is_meta
            own = _square(moved) if sampled else 0.0
            await self.share_(moved, bucket, start, state, wire)
            if sampled:
                state.note_distance(own - _square(moved), _square(anchor[span]))
            outer.step_(anchor[span], moved, velocity if velocity is None else velocity[span])
            target[span] = anchor[span]
        await training_thread()
        if self.delay:
            bucket.add_(target.sub_(now))  # what was changed meanwhile stays
        else:
            bucket.write_(target)
        if state.tuner is not None:
            state.tuner.end(bucket, wire.now())

    def instruments(self, state: LocalState) -> Mapping[str, float]:
        return {"interval": state.interval, "consensus_distance": state.distance}


def _square(data: Tensor) -> float:
    return float(data.square().sum())
