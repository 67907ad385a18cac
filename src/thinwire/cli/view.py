"""Shows a run while it trains: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.cli.output import note
from thinwire.recipes.follow import RunState
from thinwire.units import as_bytes, as_duration, as_metric

LINE_EVERY_S = 2.0
"""Least time between two lines."""
MAX_LINES = 20
"""Approximate number of lines of a long run."""

MOST_WIDTHS = 6
"""Layers whose widths are shown."""

Show = Callable[[RunState], None]


@contextmanager
def progress_view(title: str) -> Iterator[Show]:
    """The live view if stderr is a terminal that supports it, else lines."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        with live_view(console, title) as show:
            yield show
    else:
        yield LineView(title).show


def numbers(state: RunState) -> str:
    """The numbers of the run in one line."""
    loss, evaluated = state.mean(lambda p: p.loss), state.evaluated
    parts = [] if loss is None else [f"loss {loss:.4f}"]
    if evaluated is not None and evaluated.value is not None:
        parts.append(f"{evaluated.metric} {as_metric(evaluated.metric, evaluated.value)}")
    # workers that have not reported yet are taken to be like the others
    speed, sent = state.mean(lambda p: p.samples_per_s) or 0, state.mean(lambda p: p.sent_bytes) or 0
    parts.append(f"{speed * state.num_workers:,.0f} samples/s")
    parts.append(f"sent {as_bytes(sent * state.num_workers)}")
    parts.append(f"exposed {state.mean(lambda p: p.exposed_s / p.train_s if p.train_s else None) or 0:.0%}")
    for name in state.latest.instruments if state.latest else ():
        value = state.mean(lambda p, name=name: p.instruments.get(name))  # type: ignore[misc]
        parts += [] if value is None else [f"{name.replace('_', ' ')} {value:.3g}"]
    if state.shrunk is not None:
        widths = [width for name, width in state.shrunk.widths.items() if name not in state.shrunk.left_alone]
        parts.append(
            "widths " + "-".join(map(str, widths[:MOST_WIDTHS])) + "..." * (len(widths) > MOST_WIDTHS)
        )
    return "  ".join(parts)


class LineView:
    """Writes the title, then a line when there is news, but not too often."""

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_time = -LINE_EVERY_S
        self._last_step = 0
        note(title)

    def show(self, state: RunState) -> None:
        """Write a line if training has advanced and the last line is old enough, or training is over."""
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


@contextmanager
def live_view(console: Console, title: str) -> Iterator[Show]:
    """A progress bar and the numbers, redrawn in place, and removed when the run is over."""
    with Live(Text(title), console=console, transient=True, auto_refresh=False) as live:
        live.refresh()
        yield lambda state: live.update(_drawn(title, state), refresh=True)


def _drawn(title: str, state: RunState) -> Group:
    latest = state.latest
    if latest is None:
        up = f"starting: {len(state.started)} of {state.num_workers} workers are up"
        return Group(Text(title), Text(up))
    bar = ProgressBar(total=1.0, completed=state.done_share, width=40)
    left = "" if state.left_s is None else f"{as_duration(state.left_s)} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(f"epoch {latest.epoch}/{latest.num_epochs}", bar, f"{state.done_share:4.0%}", left)
    return Group(Text(title), row, Text(numbers(state)))
