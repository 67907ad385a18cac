"""SparseStrategy: only the largest numbers of a gradient go over the wire, the others wait in a residual."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.compress.select import prepare, refuse, select_, select_largest_
from thinwire.compress.sparse import NOT_FINITE, Values, new_words
from thinwire.compress.threshold import new_threshold
from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.parts import FIRST_DENSITY, LocalClip, MomentumCorrection, check_real
from thinwire.strategies.settings import check_types
from thinwire.strategies.sparse.cost_probe import PROBES, CostProbe
from thinwire.strategies.sparse.plan import MessageFormat, MessagePlan
from thinwire.strategies.sparse.reduction import Message, Reduction
from thinwire.strategies.sparse.state import SparseRuntime, SparseState
from thinwire.wire.wire import Wire
from thinwire.wire.work import in_background

AIM = 0.9
"""Part of the capacity that the threshold aims to fill, since how many numbers pass it varies."""
FEWEST_CHANGES = 8
"""Changes of a parameter in a training, on average: with fewer, accuracy was lost (docs/gtopk.md)."""
CHANGES_PER_WORKER = 1.5
"""With many workers so many for each of them: they agree less on which numbers are large."""
QUANTUM = 4
"""Capacity is counted in so many entries, so that no message needs padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseStrategy(Strategy):
    """Everything that top-k strategies have in common: all but who sends the selected numbers to whom."""

    density: float = 0.001
    """Part of the gradient that a step's messages can hold."""
    payload: Values = "fp32"
    """How values look on the wire: "fp32" (as they are), or "bf16" (rounded; the rest is sent later)."""
    exact: bool = False
    """Send exactly the largest of each bucket, instead of those above one threshold for all: slower."""
    warmup_steps: int = 0
    """Steps in which the density falls from 0.25 to its final value."""
    momentum: float = 0.0
    """Momentum that each worker applies before it selects (DGC's correction), for an optimizer without."""
    clip_norm: float | None = None
    """Clip each worker's own gradient to this norm times the square root of the number of workers, so that
    their mean has about this norm; then nothing is sent before backward ends."""
    keep_rate: bool = False
    """Apply waiting gradients with the learning rate of the steps they are from, not of the step they are
    sent in."""

    def __post_init__(self) -> None:
        check_types(self)
        name = type(self).__name__
        check(0 < self.density <= 1, f"{name}.density", "above 0 and at most 1", self.density)
        check(self.warmup_steps >= 0, f"{name}.warmup_steps", "0 or more steps", self.warmup_steps)
        check(0 <= self.momentum < 1, f"{name}.momentum", "0 or more and below 1", self.momentum)
        positive = self.clip_norm is None or self.clip_norm > 0
        check(positive, f"{name}.clip_norm", "None or a positive number", self.clip_norm)

    # -- what each of them says ---------------------------------------------------------------------

    @abstractmethod
    async def share(self, reduction: Reduction, message: Message, state: SparseState, wire: Wire) -> None:
        """Send this worker's message, and leave in `reduction` the mean that all workers apply."""

    @abstractmethod
    def sent_bytes(self, format: MessageFormat, world_size: int) -> int:
        """Bytes that a worker sends for one message."""

    @property
    def completes(self) -> bool:
        """Whether leftover residuals at applied indices go with the next step's messages."""
        return False

    def quantum(self, world_size: int) -> int:
        """Capacity is divided in multiples of this."""
        return QUANTUM

    def first_regions(self, numel: int, world_size: int) -> list[int]:
        """Where the region of each owner begins at first; none where nobody owns anything."""
        return []

    # -- the protocol -------------------------------------------------------------------------------

    @property
    def replicas_agree(self) -> bool:
        return True

    @property
    def adapts_in(self) -> int:
        return self.warmup_steps + PROBES.stop + self.completes  # where the step before was a usual one

    @property
    def num_buckets(self) -> int:
        return 6  # sparse messages are small: their number costs more than the wait for the last one

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> SparseState:
        check_real(buckets, type(self).__name__)
        residuals = [bucket.zeros("residual", on_resize="sum", part="large") for bucket in buckets]
        if wire.world_size > 1:
            for like in {(each.dtype, each.device): each for each in residuals if not each.is_meta}.values():
                prepare(like)
        plan = MessagePlan(self, buckets, wire.world_size)
        state = SparseState(
            residuals=residuals,
            threshold=new_threshold(residuals),
            weights=plan.even,
            regions=[self.first_regions(numel, wire.world_size) for numel in plan.numels],
            rates=self._rates(buckets),
            kept=new_words(plan.most_kept, residuals[0].device),
            kept_capacities=[0] * len(buckets),
            kept_counts=[0] * len(buckets),
        )
        probe = CostProbe(sum(bucket.gradient.nbytes for bucket in buckets))
        state.runtime = SparseRuntime(buckets, plan, probe)
        if self.clip_norm is not None:
            state.runtime.clip = LocalClip(self.clip_norm, len(buckets))
        if self.momentum:
            state.runtime.momentum = MomentumCorrection.of(self.momentum, buckets, type(self).__name__)
        return state

    def _rates(self, buckets: Sequence[Bucket]) -> list[float]:
        if not self.keep_rate:
            return []
        rates = [bucket.rate for bucket in buckets]
        known = [rate for rate in rates if rate is not None]
        rule = "False where the optimizer is not known"
        hint = "join it by tw.attach(model, optimizer, ...), which knows the learning rate"
        check(len(known) == len(rates), f"{type(self).__name__}.keep_rate", rule, True, hint=hint)
        return known

    async def reduce(self, bucket: Bucket, state: SparseState, wire: Wire) -> None:
        runtime = state.runtime
        if bucket.index == 0:
            self._begin(bucket.step - 1, state, wire)
        await in_background()
        if runtime.clip is not None:
            await runtime.clip.clip_(bucket.gradient[: bucket.num_parameters], wire.world_size)
        if runtime.momentum is not None:
            # Leftover residuals at these indices are sent now, so their momentum has been applied too.
            runtime.momentum.mask_(bucket.index, runtime.kept[bucket.index].long())
            runtime.momentum.accelerate_(bucket.index, bucket.gradient)
        if wire.world_size == 1:
            return
        if self.keep_rate:
            state.scale_for_rate_(bucket.index)
        runtime.probe.begin(wire.now())
        format = runtime.formats[bucket.index]
        if format is None:
            await self._send_dense(bucket, state, wire)
        else:
            lossy, tail = bucket.gradient[: bucket.exact_from], bucket.gradient[bucket.exact_from :]
            kept = runtime.kept[bucket.index] if format.held else None
            residual = state.residuals[bucket.index]
            reduction = Reduction(bucket.index, lossy, tail, residual, format, kept)
            await self.share(reduction, self._select(reduction, bucket.step - 1, state), state, wire)
        runtime.probe.end(wire.now())

    def _begin(self, step: int, state: SparseState, wire: Wire) -> None:
        """A pass begins: decide the formats of its messages."""
        runtime = state.runtime
        runtime.kept = state.last_kept()
        state.threshold.begin()
        runtime.formats = runtime.plan.formats(step, state.weights, state.kept_capacities)
        kept = (each.layout.capacity if each and self.completes else 0 for each in runtime.formats)
        state.kept_capacities = list(kept)
        state.kept_counts = [0] * len(state.kept_capacities)
        runtime.probe.next_step(step - self.warmup_steps, type(self).__name__, tell=wire.rank == 0)
        runtime.sent = runtime.passed = 0

    def _select(self, reduction: Reduction, step: int, state: SparseState) -> Message:
        """Move the largest numbers from the residual to a message."""
        format, runtime = reduction.format, state.runtime
        message = Message(new_words(format.num_words, reduction.residual.device), format)
        if reduction.is_meta:
            return message
        if reduction.kept is not None:
            place = reduction.kept.long()
            message.held[: place.numel()] = reduction.residual[place]
            reduction.residual[place] = 0
        layout, parts = format.layout, (reduction.lossy, reduction.residual)
        if self.exact:
            select_largest_(*parts, layout.capacity, message.sparse, layout)
        else:
            density = AIM * runtime.plan.density_at(step)
            threshold = state.threshold.before(reduction.index, *parts, density)
            select_(*parts, threshold, message.sparse, layout)
        message.tail.copy_(reduction.tail)
        message = Message(message.words.to(reduction.device), message.format)
        if message.count == NOT_FINITE:
            refuse(reduction.residual, runtime.buckets[reduction.index].name_at)
        if not self.exact:
            state.threshold.after(reduction.index, message.sparse)
        runtime.sent += message.count
        runtime.passed += message.passed
        if runtime.momentum is not None:
            runtime.momentum.mask_(reduction.index, message.entries().index)
        return message

    async def _send_dense(self, bucket: Bucket, state: SparseState, wire: Wire) -> None:
        """Send every number of a bucket, with its residual."""
        runtime = state.runtime
        lossy, residual = bucket.gradient[: bucket.exact_from], state.residuals[bucket.index]
        residual.add_(lossy)
        lossy.copy_(residual)
        residual.sub_(lossy)  # the part that half precision cannot hold
        if runtime.momentum is not None:
            runtime.momentum.mask_(bucket.index, slice(bucket.exact_from))
        runtime.sent += lossy.numel()
        runtime.passed += lossy.numel()
        began_s = wire.now()
        await wire.all_reduce_(bucket.gradient)
        if bucket.step - 1 - self.warmup_steps in PROBES and lossy.numel():
            runtime.probe.probed(bucket.gradient.nbytes, wire.now() - began_s)
        bucket.gradient.div_(wire.world_size)

    # -- what it says of itself ---------------------------------------------------------------------

    def advice(self, num_steps: int | None, world_size: int) -> str:
        fewest = max(FEWEST_CHANGES, CHANGES_PER_WORKER * world_size)
        name = f"{type(self).__name__} with density={self.density:g}"
        few = f"fewer than about {fewest:g} with {world_size} workers may cost more than a point of accuracy"
        where = "see docs/gtopk.md, 'What it costs in accuracy'"
        if num_steps is None:
            if self.density >= FIRST_DENSITY:
                return ""
            return (
                f"{name} changes a parameter {fewest:g} times in {fewest / self.density:,.0f} steps; {few}: "
                f"train as long, or give attach num_steps, and it says which density is enough; {where}"
            )
        changes = self.density * num_steps
        if changes >= fewest:
            return ""
        enough = fewest / max(1, num_steps)
        more = f"set density={enough:.2g} or more"
        better = more if enough < FIRST_DENSITY else "send everything (all-reduce)"
        return (
            f"{name} changes a parameter {changes:.2g} times in {num_steps:,} steps; {few}: {better}, "
            f"or train longer; {where}"
        )

    def instruments(self, state: SparseState) -> Mapping[str, float]:
        runtime = state.runtime
        numel = sum(residual.numel() for residual in state.residuals)
        return {
            "density": runtime.sent / max(1, numel),
            "left_share": (runtime.passed - runtime.sent) / max(1, runtime.passed),
            "sparse_s": runtime.probe.sparse_s,
            "dense_s": runtime.probe.dense_s,
        }
