"""Shows a run while it goes on: a live view on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.cli.output import note
from thinwire.cli.state import RunState
from thinwire.units import as_bytes, as_duration, as_metric

LINE_EVERY_S = 2.0
"""At most one line in this time,"""
MAX_LINES = 20
"""and in a long run about as many as this."""


class View(Protocol):
    """Something that shows a run; entered before the first `show`."""

    def show(self, state: RunState) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def choose_view(title: str, *, clock: Callable[[], float] = time.monotonic) -> View:
    """The live view if stderr is a terminal that can do it, else lines."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, title)
    return LineView(title, clock=clock)


def numbers(state: RunState) -> str:
    """The run in one line, without its place."""
    parts = []
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.evaluated is not None and state.evaluated.value is not None:
        parts.append(f"{state.evaluated.metric} {as_metric(state.evaluated.metric, state.evaluated.value)}")
    parts.append(f"{state.samples_per_s:,.0f} samples/s")
    parts.append(f"sent {as_bytes(state.sent_bytes)}")
    parts.append(f"exposed {state.exposed_share:.0%}")
    return "  ".join(parts)


class LineView:
    """One line when there is news, but not too many."""

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._clock = clock
        self._last_time = -LINE_EVERY_S
        self._last_step = 0

    def show(self, state: RunState) -> None:
        """Write a line if training has moved on and the last one is some time ago, or it is over."""
        latest = state.latest
        if latest is None or latest.step == self._last_step:
            return
        over = state.evaluated is not None and state.evaluated.step == latest.num_steps
        gap_s = max(LINE_EVERY_S, latest.train_s / state.done_share / MAX_LINES)
        if self._clock() - self._last_time < gap_s and not over:
            return
        self._last_time, self._last_step = self._clock(), latest.step
        width = len(str(latest.num_epochs))
        left = "" if over or state.left_s is None else f"  {as_duration(state.left_s)} left"
        note(f"epoch {latest.epoch:{width}}/{latest.num_epochs}  {numbers(state)}{left}")

    def __enter__(self) -> Self:
        note(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveView:
    """A bar and the numbers, redrawn in place; gone when the run is over."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def show(self, state: RunState) -> None:
        """Draw the run as it is now."""
        self._live.update(self._drawn(state), refresh=True)

    def _drawn(self, state: RunState) -> Group:
        latest = state.latest
        if latest is None:
            return Group(
                Text(self._title), Text(f"starting: {len(state.pids)} of {state.num_workers} workers are up")
            )
        left = "" if state.left_s is None else f"{as_duration(state.left_s)} left"
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"epoch {latest.epoch}/{latest.num_epochs}"),
            ProgressBar(total=1.0, completed=state.done_share, width=40),
            Text(f"{state.done_share:4.0%}"),
            Text(left),
        )
        return Group(Text(self._title), row, Text(numbers(state)))

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._live.update(Text(self._title), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
