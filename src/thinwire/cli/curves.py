"""Curves of several runs: loss and metric against seconds and epochs, how far replicas are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.errors import MissingExtra
from thinwire.events import Evaluated, read_events

FILE = "curves.png"


def draw(folder: Path) -> Path:
    """Draw the runs below `folder` into one picture there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib is not installed", hint="pip install 'thinwire[report]'") from None
    runs = {run.name: _evaluations(run) for run in sorted(folder.iterdir()) if run.is_dir()}
    runs = {name: points for name, points in runs.items() if points}
    metric = next((points[0].metric for points in runs.values()), "")
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels: Any = figure.subplots(2, 3)
    columns = [("virtual seconds", lambda p: p.train_s), ("epochs", lambda p: p.epoch)]
    for column, (label, place) in enumerate(columns):
        for row, (what, value) in enumerate([("test loss", lambda p: p.loss), (metric, lambda p: p.value)]):
            _panel(panels[row][column], runs, place, value, label, what)
    _panel(
        panels[0][2], runs, lambda p: p.epoch, lambda p: p.distance, "epochs", "distance from the mean model"
    )
    _panel(panels[1][2], runs, lambda p: p.epoch, lambda p: p.train_s, "epochs", "virtual seconds")
    panels[0][0].legend(fontsize="small", frameon=False)
    path = folder / FILE
    figure.savefig(path, dpi=110)
    return path


def _evaluations(run: Path) -> list[Evaluated]:
    return [event.record for event in read_events(run) if isinstance(event.record, Evaluated)]


def _panel(axes: Any, runs: dict[str, list[Evaluated]], place: Any, value: Any, x: str, y: str) -> None:
    for name, points in runs.items():
        axes.plot([place(p) for p in points], [value(p) for p in points], marker=".", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
