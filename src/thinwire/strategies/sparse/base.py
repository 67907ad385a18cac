"""SparseStrategy: only the largest numbers of a gradient go over the wire, the others wait in a residual."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from thinwire.compress.layout import NOT_FINITE, Values
from thinwire.errors import SettingError, check, check_one_of
from thinwire.strategies.base import Bucket, Gradients, Strategy, own_norm
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.gauge import PROBES, Gauge
from thinwire.strategies.sparse.plan import Plan
from thinwire.strategies.sparse.rooms import FIRST_DENSITY
from thinwire.strategies.sparse.state import Fixed, SparseState
from thinwire.strategies.sparse.turn import Message, Turn
from thinwire.traffic import Cluster, Round, Sizes
from thinwire.wire.base import Wire, Work, take_off

if TYPE_CHECKING:
    from torch import Tensor

AIM = 0.9
"""Part of the room in messages that the threshold aims to fill, since what passes it varies."""
FEWEST_CHANGES = 8
"""Of a parameter in a training, on average: with fewer, accuracy was lost (docs/gtopk.md)."""
QUANTUM = 4
"""Room is counted in so many entries, so that no message needs padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseStrategy(Strategy):
    """What top-k strategies have in common: all but who sends the selected numbers to whom."""

    density: float = 0.001
    """Part of the gradient that a message has room for."""
    payload: Values = "fp32"
    """How values look on the wire: "fp32" (as they are), or "bf16" (rounded; the rest is sent later)."""
    exact: bool = False
    """Send exactly the largest of each bucket, instead of those above one threshold for all: slower."""
    warmup_steps: int = 0
    """Steps in which the density falls from 0.25 to what it is to be."""
    momentum: float = 0.0
    """Momentum that each worker applies before it selects (DGC's correction), for an optimizer without."""
    clip_norm: float | None = None
    """Clip each worker's own gradient to this norm times the square root of the number of workers, so that
    their mean has about this norm; then nothing is sent before backward ends."""
    keep_rate: bool = False
    """Apply what has waited with the learning rate of the steps it is from, not of the step it is sent in."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(0 < self.density <= 1, f"{name}.density", "above 0 and at most 1", self.density)
        check_one_of(f"{name}.payload", self.payload, get_args(Values))
        check(self.warmup_steps >= 0, f"{name}.warmup_steps", "0 or more steps", self.warmup_steps)
        check(0 <= self.momentum < 1, f"{name}.momentum", "0 or more and below 1", self.momentum)
        positive = self.clip_norm is None or self.clip_norm > 0
        check(positive, f"{name}.clip_norm", "None or a positive number", self.clip_norm)

    # -- what each of them says ---------------------------------------------------------------------

    @abstractmethod
    async def share(self, turn: Turn, message: Message, state: SparseState, wire: Wire) -> None:
        """Send this worker's message, and leave in `turn` the mean of what all workers apply."""
        ...

    @abstractmethod
    def sparse_rounds(self, form: Form, world_size: int) -> Iterable[Round]:
        """The wire operations for one message."""
        ...

    @property
    def completes(self) -> bool:
        """Whether what residuals hold at indices that were applied goes with the next step's messages."""
        return False

    def quantum(self, world_size: int) -> int:
        """Room is divided in multiples of this."""
        return QUANTUM

    # -- the protocol -------------------------------------------------------------------------------

    @property
    def replicas_agree(self) -> bool:
        return True

    @property
    def adapts_in(self) -> int:
        return self.warmup_steps + PROBES.stop + self.completes  # where the step before was a usual one

    @property
    def conserved(self) -> tuple[str, ...]:
        return ("residuals", "velocities")

    @property
    def clips(self) -> bool:
        return self.clip_norm is not None

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> SparseState:
        from thinwire.compress.select import prepare
        from thinwire.compress.sparse import new_words
        from thinwire.compress.threshold import new_threshold

        if self.momentum and any(bucket.companions for bucket in buckets):
            raise SettingError(
                f"{type(self).__name__}.momentum must be 0 with an optimizer that has momentum itself, got "
                f"{self.momentum}",
                hint="take it off the optimizer (SGD without momentum), or leave it to the optimizer alone",
            )
        residuals = [_wide(b.gradient[: b.exact_from]).clone().zero_() for b in buckets]
        whole = [_wide(b.gradient[: b.num_parameters]).clone().zero_() for b in buckets if self.momentum]
        if wire.world_size > 1:
            for like in {(each.dtype, each.device): each for each in residuals if not each.is_meta}.values():
                prepare(like)
        sizes = Sizes(
            tuple((b.gradient.numel(), b.gradient.element_size()) for b in buckets),
            exact=tuple(b.gradient.numel() - b.exact_from for b in buckets),
        )
        plan = self._plan(sizes, wire.world_size)
        state = SparseState(
            residuals=residuals,
            velocities=whole,
            threshold=new_threshold(residuals),
            weights=plan.even,
            regions=[self.first_regions(numel, wire.world_size) for numel in plan.numels],
            rates=self._rates(buckets),
            kept=new_words(plan.most_kept, residuals[0].device),
            rooms=[0] * len(buckets),
            counts=[0] * len(buckets),
        )
        gauge = Gauge(sum(bucket.gradient.nbytes for bucket in buckets))
        state.fixed = Fixed(buckets, plan, gauge)
        return state

    def first_regions(self, numel: int, world_size: int) -> list[int]:
        """Where the region of each owner begins at first; none where nobody owns anything."""
        return []

    def _rates(self, buckets: Sequence[Bucket]) -> list[float]:
        if not self.keep_rate:
            return []
        rates = [bucket.rate for bucket in buckets]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            raise SettingError(
                f"{type(self).__name__}.keep_rate must be False where the optimizer is not known, got True",
                hint="join it by tw.attach(model, optimizer, ...), which knows the learning rate",
            )
        return known

    async def reduce(self, bucket: Gradients, state: SparseState, wire: Wire) -> None:
        if bucket.index == 0:
            self._begin(state, wire)
        await take_off()
        if self.clip_norm is not None:
            await self._clip(bucket, state, wire.world_size, self.clip_norm)
        if self.momentum:
            state.accelerate_(bucket.index, bucket.gradient, self.momentum)
        if wire.world_size == 1:
            return
        if self.keep_rate:
            state.keep_rate_(bucket.index)
        gauge = state.fixed.gauge
        gauge.begin(wire.now())
        form = state.fixed.forms[bucket.index]
        if form is None:
            await self._send_all(bucket, state, wire)
        else:
            cut = bucket.exact_from
            residual = state.residuals[bucket.index]
            kept = state.fixed.kept[bucket.index] if form.held else None
            turn = Turn(bucket.index, bucket.gradient[:cut], bucket.gradient[cut:], residual, form, kept)
            await self.share(turn, self._select(turn, state), state, wire)
        gauge.end(wire.now())

    def _begin(self, state: SparseState, wire: Wire) -> None:
        """A step begins: how much room its messages have."""
        state.step += 1
        fixed = state.fixed
        fixed.kept = state.last_kept()
        fixed.forms = fixed.plan.forms(state.step, state.weights, state.rooms)
        state.rooms = fixed.plan.rooms_to_keep(fixed.forms)
        state.counts = [0] * len(state.rooms)
        fixed.gauge.next_step(state.step - self.warmup_steps, type(self).__name__, tell=wire.rank == 0)
        fixed.norm, fixed.squares = Work(), 0.0
        fixed.sent = fixed.passed = 0

    # -- the gradients of one worker ------------------------------------------------------------------

    async def _clip(self, bucket: Gradients, state: SparseState, world_size: int, clip_norm: float) -> None:
        fixed = state.fixed
        gradients = bucket.gradient[: fixed.buckets[bucket.index].num_parameters]
        fixed.squares += 0.0 if gradients.is_meta else float(gradients.norm()) ** 2
        if bucket.index == len(fixed.buckets) - 1:
            fixed.norm.finish()
        await fixed.norm
        scale = own_norm(clip_norm, world_size) / math.sqrt(fixed.squares) if fixed.squares > 0 else 1.0
        if scale < 1:
            gradients.mul_(scale)

    def _select(self, turn: Turn, state: SparseState) -> Message:
        """Move the largest numbers from the residual to a message."""
        from thinwire.compress.select import refuse, select_, select_largest_

        message = turn.new_message()
        if turn.is_meta:
            return message
        if turn.kept is not None:
            place = turn.kept.long()
            message.held(turn.residual)[: place.numel()] = turn.residual[place]
            turn.residual[place] = 0
        name_at = state.fixed.buckets[turn.index].name_at
        layout, parts = turn.form.layout, (turn.lossy, turn.residual)
        if self.exact:
            select_largest_(*parts, layout.capacity, message.sparse, layout, name_at=name_at)
        else:
            density = AIM * state.fixed.plan.density_at(state.step)
            threshold = state.threshold.before(turn.index, *parts, density)
            select_(*parts, threshold, message.sparse, layout, name_at=name_at)
        message.tail(turn.residual).copy_(turn.tail)
        message = message.to(turn.device)
        if not self.exact:
            state.threshold.after(turn.index, message.sparse)
        if message.count == NOT_FINITE:
            refuse(turn.residual, name_at)
        state.fixed.sent += message.count
        state.fixed.passed += message.passed
        if self.momentum:
            state.stop_(turn.index, message.entries().index)
        return message

    async def _send_all(self, bucket: Gradients, state: SparseState, wire: Wire) -> None:
        """Send every number of a bucket, with what was kept of it."""
        lossy, residual = bucket.gradient[: bucket.exact_from], state.residuals[bucket.index]
        residual.add_(lossy)
        lossy.copy_(residual)
        residual.sub_(lossy)  # what half precision cannot hold
        if self.momentum:
            state.stop_(bucket.index, slice(bucket.exact_from))
        state.fixed.sent += lossy.numel()
        state.fixed.passed += lossy.numel()
        began_s = wire.now()
        await wire.all_reduce_(bucket.gradient)
        if state.step - self.warmup_steps in PROBES and lossy.numel():
            state.fixed.gauge.probed(bucket.gradient.nbytes, wire.now() - began_s)
        bucket.gradient.div_(wire.world_size)

    # -- what it says of itself ---------------------------------------------------------------------

    def rounds(self, sizes: Sizes, cluster: Cluster, step: int = 0) -> Iterable[Round]:
        return self._plan(sizes, cluster.world_size).rounds(step)

    def _plan(self, sizes: Sizes, world_size: int) -> Plan:
        return Plan(
            sizes=sizes,
            world_size=world_size,
            density=self.density,
            warmup_steps=self.warmup_steps,
            payload=self.payload,
            quantum=self.quantum(world_size),
            completes=self.completes,
            sparse_rounds=self.sparse_rounds,
        )

    def caution(self, num_steps: int) -> str:
        changes, enough = self.density * num_steps, FEWEST_CHANGES / max(1, num_steps)
        if changes >= FEWEST_CHANGES:
            return ""
        better = (
            f"set density={enough:.2g} or more" if enough < FIRST_DENSITY else "send everything (all-reduce)"
        )
        return (
            f"{type(self).__name__} with density={self.density:g} changes a parameter {changes:.2g} times in "
            f"{num_steps:,} steps; fewer than about {FEWEST_CHANGES} cost accuracy: {better}, or train longer"
        )

    def instruments(self, state: SparseState) -> Mapping[str, float]:
        fixed = state.fixed
        numel = sum(residual.numel() for residual in state.residuals)
        return {
            "density": fixed.sent / max(1, numel),
            "left_share": (fixed.passed - fixed.sent) / max(1, fixed.passed),
            "sparse_s": fixed.gauge.sparse_s,
            "dense_s": fixed.gauge.dense_s,
        }


def _wide(data: Tensor) -> Tensor:
    """Half precision is too little to add up in."""
    return data.float() if data.element_size() < 4 else data
