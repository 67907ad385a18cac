"""How long workers wait for each other: one knob, `silence_s`, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """What follows from one number of seconds."""

    silence_s: float
    """A worker that nobody has heard of for so long is lost: killed, frozen or cut off."""

    @property
    def ask_s(self) -> float:
        """Silent for so long, a worker is asked for by way of the others."""
        return self.silence_s / 2

    @property
    def unanswered_s(self) -> float:
        """A connection whose other host has not answered for so long is broken."""
        return 0.8 * self.silence_s

    @property
    def alone_s(self) -> float:
        """A side of a split world that is no majority waits so long before it stops."""
        return 3 * self.silence_s

    def describe(self, timeout_s: float, *, elastic: bool) -> str:
        """One line for the start of a run."""
        parts = [
            f"heartbeats every {BEAT_S:g} s",
            "a worker whose connections break is lost at once",
            f"one whose host does not answer after {self.unanswered_s:g} s",
            f"a silent one after {self.silence_s:g} s",
        ]
        if elastic:
            parts += [
                f"asked for through the others after {self.ask_s:g} s",
                f"a side without a majority stops after {self.alone_s:g} s",
            ]
        parts.append(f"one that is alive and late is waited for {timeout_s:g} s (timeout_s)")
        return f"time-outs from silence_s={self.silence_s:g}: {', '.join(parts)}"
