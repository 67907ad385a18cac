"""When which fault is due: a pure piece of bookkeeping, without processes or clocks; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.hosts.faults import Fault


@dataclass(frozen=True, slots=True)
class Event:
    """A fault that begins, or one with a duration that ends."""

    fault: Fault
    ends: bool = False


class Schedule:
    """Hands out every fault once, and the end of those that last some seconds."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._pending = list(faults)
        self._ends: list[tuple[float, Fault]] = []

    def due(self, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> list[Event]:
        """What happens now, in the order it was written. `steps` and `alive` are per host."""
        events = [Event(fault, ends=True) for end_s, fault in self._ends if end_s <= now_s]
        self._ends = [(end_s, fault) for end_s, fault in self._ends if end_s > now_s]
        for fault in [f for f in self._pending if _is_due(f, now_s, steps, alive)]:
            self._pending.remove(fault)
            self.begun(fault, now_s)
            events.append(Event(fault))
        return events

    def begun(self, fault: Fault, now_s: float) -> None:
        """Remember when a fault that began now ends."""
        if fault.seconds is not None:
            self._ends.append((now_s + fault.seconds, fault))

    @property
    def pending(self) -> tuple[Fault, ...]:
        return tuple(self._pending)


def _is_due(fault: Fault, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> bool:
    if fault.after_s is not None:
        return now_s >= fault.after_s
    assert fault.step is not None
    own = fault.host is not None and alive[fault.host]
    return (steps[fault.host] if own and fault.host is not None else max(steps)) >= fault.step
