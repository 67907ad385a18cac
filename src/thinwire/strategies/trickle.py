"""Trickle: a small part of the model in turn, one bit for each change, with slow momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.compress.codec import MOST_SPARSE, Codec, codec_of
from thinwire.compress.payload import ChangePayload
from thinwire.errors import check
from thinwire.strategies.base import Bucket, step_scale
from thinwire.strategies.local.base import LocalState, LocalStrategy, Outer
from thinwire.strategies.local.budget import DECIDES_AT, BudgetTuner
from thinwire.strategies.local.expected import known, options
from thinwire.strategies.local.fragments import Fragments, check_fragments
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

FEW_WORKERS = 4
FEWEST_CHANGES = 15
"""Changes of a parameter in a training, on average: with fewer, accuracy was lost (docs/trickle.md)."""
FEWEST_STEPS = 4000
"""Steps of a training where all changes travel: with fewer, accuracy was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trickle(LocalStrategy):
    """Train on a thin wire: about a two-hundredth of the bytes of exact SGD, sent behind the compute.

    Every step a fragment of the model is due, a different one each time. Workers send the signs of what local
    steps changed in it since the common anchor, and the mean size of every 512 changes; what this does not
    show stays in a worker's own parameters. Signs of the sums come back, they move the anchor with Nesterov
    momentum m, and workers go on from there.

    So that the user's learning rate keeps its meaning, it is scaled for the time of a step: by 1 - m, since
    momentum multiplies steps by 1 / (1 - m); and of optimizers with normalised steps, such as AdamW, by the
    root of the number of workers, 2 at most (`step_scale`).
    """

    interval: int = 8
    """Steps after which a fragment is due again."""
    fragments: int | None = None
    """Parts of the model that are due in turn; none: as many as the interval has steps."""
    density: float = 1.0
    """Part of the changes that is sent, the largest of every 256; of their sums up to three times as much."""
    payload: ChangePayload | None = None
    """How changes look on the wire: "sign" (one bit), "int4", "int8", "bf16" or "fp32" (as they are); none:
    signs, or one byte each where only the largest are sent."""
    momentum: float | Literal["auto"] = "auto"
    """Momentum of the outer step. "auto": 0.5 up to four workers and 0.75 with more; 0 where the optimizer's
    steps are normalised."""
    delay: int = 1
    """Steps that a fragment may take to come back; 0: training waits for it."""
    budget: Literal["auto"] | None = None
    """"auto": choose interval and density, of those whose accuracy is known, so that sending fits behind the
    compute as the first steps measure it, and say what that is expected to cost."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fragments("Trickle", self.interval, self.num_fragments, self.delay)
        check(0 < self.density <= 1, "Trickle.density", "above 0 and at most 1", self.density)
        if self.budget == "auto":
            usual = (self.interval, self.fragments, self.density, self.payload) == (8, None, 1.0, None)
            rule = "None where interval, fragments, density or payload are given"
            check(usual, "Trickle.budget", rule, self.budget)
            check(self.delay == 1, "Trickle.delay", "1 with a budget", self.delay)
        whole = self.payload in (None, "int8") or self.density == 1
        check(whole, "Trickle.payload", "'int8' with a density below 1", self.payload)
        valid = self.momentum == "auto" or 0 <= self.momentum < 1
        check(valid, "Trickle.momentum", "0 or more and below 1, or 'auto'", self.momentum)

    @property
    def num_fragments(self) -> int:
        return self.interval if self.fragments is None else self.fragments

    @property
    def period(self) -> int:
        return max(row.interval for row in known()) if self.budget == "auto" else self.interval

    @property
    def adapts_in(self) -> int:
        return DECIDES_AT + 1 if self.budget == "auto" else 0

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LocalState:
        state = LocalStrategy.init(self, buckets, wire)
        if self.budget == "auto":
            state.interval = self.interval
            numels = [bucket.num_parameters for bucket in buckets]
            state.tuner = BudgetTuner(numels, state.anchors[0].element_size())
        return state

    @property
    def num_buckets(self) -> int:
        return max(4, self.num_fragments)

    @property
    def codec(self) -> Codec:
        return codec_of(self.payload, self.density)

    def advice(self, num_steps: int | None, world_size: int) -> str:
        where = "see docs/trickle.md, 'What it costs in accuracy'"
        if self.budget == "auto":
            row = max(options(world_size), key=lambda row: row.points)
            few = self._few_changes(num_steps, row.interval, row.density)
            told = f"; {few}" if few else ""
            return (
                f"Trickle with budget='auto' may choose {row}, which cost {row.points:.1f} points of "
                f"accuracy with {row.workers} workers ({row.where}){told}; {where}"
            )
        few = self._few_changes(num_steps, self.interval, self.density)
        joined = "in" if self.density > MOST_SPARSE else "with"
        return f"Trickle {joined} {few}; {where}" if few else ""

    def _few_changes(self, num_steps: int | None, interval: int, density: float) -> str:
        """Advice on too few changes of a parameter; empty where there are enough."""
        if num_steps is None:
            return ""
        if density > MOST_SPARSE:
            if num_steps >= FEWEST_STEPS:
                return ""
            short = f"{num_steps:,} steps: fewer than about {FEWEST_STEPS:,} cost more accuracy"
            return f"{short}; use GossipGraD() or SASGD(interval=2), or train longer"
        changes = density * num_steps / interval
        if changes >= FEWEST_CHANGES:
            return ""
        enough = FEWEST_CHANGES * interval / max(1, num_steps)
        better = f"set density={enough:.2g} or more" if enough <= MOST_SPARSE else "set density=1"
        return (
            f"density={density:g} and interval={interval} changes a parameter {changes:.2g} times in "
            f"{num_steps:,} steps; fewer than about {FEWEST_CHANGES} cost accuracy: {better}, or train longer"
        )

    def outer_momentum(self, world_size: int, normalised: bool) -> float:
        """The momentum for this number of workers."""
        if self.momentum != "auto":
            return self.momentum
        if world_size == 1 or normalised:
            return 0.0
        return 0.5 if world_size <= FEW_WORKERS else 0.75

    def rate_scale(self, state: LocalState, world_size: int, normalised: bool) -> float:
        longer = step_scale(world_size, normalised, state.interval)
        return longer * (1 - self.outer_momentum(world_size, normalised))

    def cut(self, numels: Sequence[int]) -> Fragments:
        return Fragments(numels, self.num_fragments)

    def outer(self, world_size: int, normalised: bool) -> Outer:
        return Outer(1.0, self.outer_momentum(world_size, normalised))
