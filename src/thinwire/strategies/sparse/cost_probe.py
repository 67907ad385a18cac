"""Measures whether sparse sending pays: its time, against the time an all-reduce of everything would take."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger("thinwire")

PROBES = range(3, 6)
"""Steps after the warm-up in which the largest bucket goes dense, to measure what that costs on this wire."""
JUDGED = 12
"""Steps after the warm-up at which the two are compared."""


@dataclass(slots=True)
class CostProbe:
    """One worker's measurements.

    Sending everything is assumed to take as long per byte as an all-reduce of the largest bucket did, the
    shortest of a few. Against it stand the seconds of a step in which at least one bucket was being selected,
    sent or merged, again the shortest: so a peer that was late once does not count.
    """

    dense_bytes: int
    """The size of all buckets."""
    sparse_s: float = 0.0
    """Seconds of selecting and sending in one step; 0: not known yet."""
    dense_s: float = 0.0
    """Seconds an all-reduce of everything would take; 0: not known yet."""
    _under_way: int = 0
    _since_s: float = 0.0
    _busy_s: float = 0.0
    _steps_s: list[float] = field(default_factory=list)
    _probes_s: list[float] = field(default_factory=list)

    def begin(self, now_s: float) -> None:
        """A bucket is started."""
        if self._under_way == 0:
            self._since_s = now_s
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """A bucket is finished."""
        self._under_way -= 1
        if self._under_way == 0:
            self._busy_s += now_s - self._since_s

    def probed(self, num_bytes: int, seconds: float) -> None:
        """A bucket of this size went dense."""
        self._probes_s.append(seconds * self.dense_bytes / num_bytes)

    def next_step(self, step: int, name: str, *, tell: bool) -> None:
        """A step begins, counted from the end of the warm-up; judge when there is enough to go by."""
        if step - 1 > PROBES[-1]:
            self._steps_s.append(self._busy_s)
        self._busy_s = 0.0
        if step == JUDGED and self._probes_s and self._steps_s:
            self.sparse_s, self.dense_s = min(self._steps_s), min(self._probes_s)
            if tell and self.sparse_s > self.dense_s:
                _log.warning(
                    "%s does not pay here: selecting and sending takes %.3g s of every step, "
                    "sending everything with AllReduce() about %.3g s: use AllReduce() here "
                    "(--strategy all-reduce); see docs/topk.md, 'Does it pay?'",
                    name,
                    self.sparse_s,
                    self.dense_s,
                )
