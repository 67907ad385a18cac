"""What AutoStrategy measures: the parts of a step, and the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from thinwire.strategies.base import Bucket
from thinwire.wire.wire import Wire

LEAST_PROBE, MOST_PROBE, PROBE_SHARE = 1 << 14, 1 << 20, 1 / 32
"""Numbers that are sent to measure the wire: a part of the model's, within bounds."""


@dataclass(slots=True)
class StepTimer:
    """What one worker sees of its steps between two considerations."""

    began_s: float | None = None
    """When the last step had been made."""
    reduced_s: float | None = None
    """When the last bucket of the step under way was reduced."""
    compute_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def full(self, now_s: float) -> None:
        """The last bucket of a step is full: computing has ended."""
        if self.began_s is not None:
            self.compute_s.append(now_s - self.began_s)

    def stepped(self, now_s: float) -> None:
        if self.began_s is not None:
            self.step_s.append(now_s - self.began_s)
            if self.reduced_s is not None:
                self.optimizer_s.append(now_s - self.reduced_s)
        self.began_s, self.reduced_s = now_s, None

    def read(self) -> list[float]:
        """Medians of forward with backward, of the optimizer and of whole steps, and begin anew."""
        found = [median(s) if s else 0.0 for s in (self.compute_s, self.optimizer_s, self.step_s)]
        self.compute_s, self.optimizer_s, self.step_s, self.began_s = [], [], [], None
        return found


async def measure_wire(buckets: Sequence[Bucket], wire: Wire) -> tuple[float, float]:
    """Seconds of one hop of a collective, and bits per second while all send."""
    like, hops = buckets[0].gradient, 2 * (wire.world_size - 1)
    numbers = sum(bucket.num_parameters for bucket in buckets) * PROBE_SHARE
    few, many = like.new_zeros(8), like.new_zeros(int(min(max(numbers, LEAST_PROBE), MOST_PROBE)))
    taken_s = []
    for data in (few, few, many):  # the first also waits for workers that are late
        began_s = wire.now()
        await wire.all_reduce_(data)
        taken_s.append(max(wire.now() - began_s, 1e-7))
    sending_s = max(taken_s[2] - taken_s[1], 0.1 * taken_s[2])
    return taken_s[1] / hops, 8 * hops / wire.world_size * many.nbytes / sending_s
