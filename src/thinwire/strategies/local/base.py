"""LocalStrategy: workers make steps of their own, and what these changed since a common anchor is shared.

Every worker holds the same anchor. When a part of the model is due, what local steps have changed in it is
averaged over workers, an outer step moves the anchor by that mean, and workers go on from there. Strategies
of this family are made of parts: when and which part of the model (`period`, `cut`), how it looks on the wire
(`codec`), among whom (`among`), and what the outer step is (`outer`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from thinwire.compress.codec import Codec
from thinwire.strategies.base import SAME, Bucket, OnResize, Part, Strategy
from thinwire.strategies.local.among import Among, Due, Everyone
from thinwire.strategies.local.fragments import Fragments, Span
from thinwire.strategies.local.progress import SampleProgress
from thinwire.strategies.local.quorum import Rounds
from thinwire.strategies.local.tuner import Tuner
from thinwire.strategies.parts import check_finite, check_real
from thinwire.wire.wire import Wire
from thinwire.wire.work import in_background, training_thread

Merge = Literal["equal", "samples"]


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
    """Velocities of the outer step; empty if it has no momentum."""
    backlogs: list[Tensor]
    """Changes that were sent to this worker and not passed on yet; empty without a codec."""
    interval: int = field(metadata=SAME)
    """Steps after which a part is due again."""
    origin: int = field(default=0, metadata=SAME)
    """The step from which these intervals are counted."""
    distance: float = 0.0
    """How far this worker was from the mean when parts were last synchronized, relative to their size."""
    chosen: int = field(default=-1, metadata=SAME)
    """Which of the measured settings a budget has chosen; -1: none yet."""
    codec: Codec | None = field(init=False, repr=False, default=None)
    """How changes look on the wire; None: as they are."""
    outer: Outer = field(init=False, repr=False)
    progress: SampleProgress | None = None
    """This worker's samples, where workers count by them; else None."""
    fragments: Fragments = field(init=False, repr=False)
    rounds: Rounds = field(init=False, repr=False)
    """Rounds of a quorum, where late workers are not waited for."""
    tuner: Tuner | None = field(init=False, repr=False, default=None)

    def due(self, bucket: Bucket) -> list[Span]:
        """The parts of a bucket to synchronize now."""
        return self.fragments.due(bucket.index, bucket.step - self.origin, self.interval)

    def part(self, bucket: Bucket, span: Span, step: int, now: Tensor, scale: float) -> Due:
        """A part of a bucket with this worker's state of it."""
        (start, stop), index = span, bucket.index
        backlog = None
        if self.backlogs:
            backlog = self.backlogs[index][start : min(stop, max(start, bucket.exact_from))]
        velocity = self.velocities[index][start:stop] if self.velocities else None
        anchor = self.anchors[index][start:stop]
        return Due(index, start, step, scale, now[start:stop], anchor, velocity, backlog)

    def note_distance(self, apart: float, size: float) -> None:
        """Update `distance` from squared norms: an average over about the last ten parts."""
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
        """The parts that buckets of these sizes are synchronized in; all at once unless said otherwise."""
        return Fragments(numels)

    def outer(self, world_size: int, normalised: bool) -> Outer:
        """The outer step, with an inner optimizer whose steps are normalised or not; plain averaging unless
        said otherwise."""
        return Outer()

    @property
    def codec(self) -> Codec | None:
        """How changes look on the wire; None: as they are."""
        return None

    @property
    def delay(self) -> int:
        """Steps after which a part is brought back; 0: training waits for it."""
        return 0

    @property
    def among(self) -> Among:
        """Among whom changes are shared."""
        return Everyone()

    @property
    def merge(self) -> Merge:
        """How much a worker counts: as much as any other, or by its samples."""
        return "equal"

    @property
    def on_cpu(self) -> bool:
        """Whether anchors, velocities and backlogs are kept in the memory of the CPU."""
        return False

    # -- the protocol -------------------------------------------------------------------------------

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LocalState:
        check_real(buckets, type(self).__name__)
        outer = self.outer(wire.world_size, buckets[0].normalised if buckets else False)
        anchors = [self._leaf(bucket, "anchor", "same", of_parameters=True) for bucket in buckets]
        for anchor, bucket in zip(anchors, buckets, strict=True):
            anchor.copy_(bucket.read())
        velocities, backlogs = list[Tensor](), list[Tensor]()
        if outer.momentum:
            velocities = [self._leaf(bucket, "velocity", "same") for bucket in buckets]
        if self.codec is not None:
            backlogs = [self._leaf(bucket, "backlog", "sum", "large") for bucket in buckets]
        state = LocalState(anchors, velocities, backlogs, self.period)
        state.outer, state.codec = outer, self.codec
        state.fragments = self.cut([bucket.num_parameters for bucket in buckets])
        if self.merge == "samples":
            state.progress = SampleProgress([0.0] * self.period)
        return state

    def _leaf(
        self,
        bucket: Bucket,
        name: str,
        on_resize: OnResize,
        part: Part = "all",
        of_parameters: bool = False,
    ) -> Tensor:
        data = bucket.zeros(name, on_resize=on_resize, part=part, of_parameters=of_parameters)
        if self.on_cpu and not data.is_meta:
            data = bucket.keep(name, data.cpu(), on_resize=on_resize, of_parameters=of_parameters)
        return data

    async def mix(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        if wire.world_size == 1 and state.outer == Outer():
            return
        if state.progress is not None:
            state.progress.count(bucket, (bucket.step - state.origin) % state.interval)
        if state.tuner is not None:
            await state.tuner.before(bucket, state, wire)
        spans = state.due(bucket)
        if not spans:
            return
        if state.tuner is not None:
            await state.tuner.begin(bucket, state, wire)
        weight = self.among.weigh(state.progress, wire)
        step, codec, now = bucket.step, state.codec, check_finite(bucket.read(), bucket)
        if self.delay:
            await in_background(due=self.delay)
        kept = now.cpu() if self.on_cpu and not now.is_meta else now
        target = kept.clone()
        scale = await weight.scale(wire.world_size)
        for start, stop in spans:
            part = state.part(bucket, (start, stop), step, kept, scale)._replace(codec=codec)
            target[start:stop] = await self.among.meet(part, state, wire)
        shared_s = wire.now()
        waited_s = await training_thread()
        if self.delay:
            bucket.add_(target.sub_(kept).to(now.device))  # what was changed meanwhile stays
        else:
            bucket.write_(target.to(now.device))
        if state.tuner is not None:
            state.tuner.end(bucket, step, shared_s, waited_s)

    def instruments(self, state: LocalState) -> Mapping[str, float]:
        return {"interval": state.interval, "consensus_distance": state.distance}
