"""Horizontal bars from zero, with whiskers and a number at the end of each."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report.drawing import Plot, new_plot, wrapped
from thinwire.report.looks import INK, MUTED
from thinwire.spread import Spread

THICK = 0.62
"""Of a bar; a row is 1."""


def bar_plot(name: str, title: str, about: str, caption: str, rows: Sequence[str]) -> Plot:
    """Axes for one bar per row, the first on top."""
    from matplotlib.ticker import MaxNLocator

    labels = [wrapped(row) for row in rows]
    row_inches = max(0.29, 0.14 * max(label.count("\n") + 1 for label in labels) + 0.06)
    plot = new_plot(name, title, about, caption, height_inches=0.75 + row_inches * max(len(rows), 2))
    plot.axes.set_yticks(range(len(rows)), labels, color=INK)
    plot.axes.set_ylim(len(rows) - 0.45, -0.55)
    plot.axes.tick_params(axis="y", length=0)
    plot.axes.spines["left"].set_visible(False)
    plot.axes.xaxis.set_major_locator(MaxNLocator(4))
    plot.axes.grid(axis="x")
    return plot


def whisker(plot: Plot, row: int, spread: Spread, size: float = 1.0) -> None:
    """Show the quartiles of what was measured more than once."""
    if spread.count > 1:
        plot.axes.plot([spread.low * size, spread.high * size], [row, row], color=INK, linewidth=0.9)


def at_end(plot: Plot, row: int, at: float, text: str) -> None:
    """Write a number behind a bar."""
    plot.axes.annotate(
        text, (at, row), xytext=(4, 0), textcoords="offset points", va="center", color=MUTED, fontsize=7.5
    )
