"""Keeps count while a recipe trains and says so in events; evaluation is left out of every number."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinwire.errors import NumericError
from thinwire.events import Progress, Record, RunEnded
from thinwire.recipes.base import Plan

EVERY_S = 0.5
"""Seconds between two progress records of a worker."""


class Stats(Protocol):
    """What the meter needs of `link.stats`."""

    @property
    def rounds(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def exposed_s(self) -> float: ...
    @property
    def instruments(self) -> Mapping[str, float]: ...


@dataclass(slots=True, kw_only=True)
class Meter:
    """Counts one worker's training between `start` and `pause`."""

    rank: int
    plan: Plan
    num_epochs: int
    stats: Callable[[], Stats]
    emit: Callable[[Record], object]
    clock: Callable[[], float] = time.perf_counter
    step: int = 0
    samples: int = 0
    train_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Totals of the link's stats, while training."""
    _began: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)
    _window: tuple[float, int] = (0.0, 0)
    """Training seconds and samples when the last progress record was written."""
    _losses: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Training goes on from here."""
        self._began = self.clock()
        self._before = self._read()

    def pause(self) -> None:
        """Training stops here; what follows, until `start`, is not counted."""
        self._count()

    def check(self, loss: float, epoch: int) -> None:
        """Raise NumericError if the loss of the coming step is not a number."""
        if not math.isfinite(loss):
            raise NumericError(
                f"worker {self.rank} on {socket.gethostname()}: the loss is {loss} at step {self.step + 1} "
                f"(epoch {epoch})",
                hint="lower the learning rate, clip gradients, and look for NaN or huge values in the data",
            )

    def stepped(self, loss: float, num_samples: int, epoch: int) -> None:
        """Count a step that was done; from time to time, and at the very end, tell."""
        self.step += 1
        self.samples += num_samples
        self._losses.append(loss)
        self._count()
        window_s, window_samples = self._window
        if self.train_s - window_s < EVERY_S and self.step < self.plan.num_steps:
            return
        self.emit(
            Progress(
                step=self.step,
                num_steps=self.plan.num_steps,
                epoch=epoch,
                num_epochs=self.num_epochs,
                loss=sum(self._losses) / len(self._losses),
                samples_per_s=(self.samples - window_samples) / max(self.train_s - window_s, 1e-9),
                sent_bytes=int(self.sums["sent_bytes"]),
                exposed_s=self.sums["exposed_s"],
                train_s=self.train_s,
                instruments=dict(self.stats().instruments),
            )
        )
        self._window = self.train_s, self.samples
        self._losses.clear()

    def ended(self) -> RunEnded:
        """This worker's totals."""
        return RunEnded(
            steps=self.step,
            rounds=int(self.sums["rounds"]),
            samples=self.samples,
            sent_bytes=int(self.sums["sent_bytes"]),
            received_bytes=int(self.sums["received_bytes"]),
            messages=int(self.sums["messages"]),
            exposed_s=self.sums["exposed_s"],
            train_s=self.train_s,
        )

    def state_dict(self) -> dict[str, Any]:
        """What is counted from the start of training, also across a stop."""
        return {"step": self.step, "samples": self.samples, "train_s": self.train_s, "sums": dict(self.sums)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on counting."""
        self.step, self.samples = saved["step"], saved["samples"]
        self.train_s, self.sums = saved["train_s"], dict(saved["sums"])
        self._window = self.train_s, self.samples

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on for a share of what another number of workers has counted, so that no total is lost."""
        share = saved[self.rank :: self.plan.world_size]
        names = saved[0]["sums"]
        self.load_state_dict(
            {
                "step": saved[0]["step"],
                "samples": sum(each["samples"] for each in share),
                "train_s": sum(each["train_s"] for each in saved) / len(saved),
                "sums": {name: sum(each["sums"][name] for each in share) for name in names},
            }
        )

    def _count(self) -> None:
        now, after = self.clock(), self._read()
        self.train_s += now - self._began
        for name, value in after.items():
            self.sums[name] = self.sums.get(name, 0) + value - self._before[name]
        self._began, self._before = now, after

    def _read(self) -> dict[str, float]:
        stats = self.stats()
        return {
            "rounds": stats.rounds,
            "sent_bytes": stats.sent_bytes,
            "received_bytes": stats.received_bytes,
            "messages": stats.messages,
            "exposed_s": stats.exposed_s,
        }
