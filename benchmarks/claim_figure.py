"""The figure of the claim: accuracy by learning rate, and by seconds with the best rate; plain SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from benchmarks.sasgd_claim import EXACT, RATES, ClaimRun

PANEL_WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 380, 300, 46, 46, 76, 20
TEXT, QUIET, GRID = "#1f2328", "#59636e", "#d0d7de"
COLOURS = {EXACT: "#59636e", "sasgd": "#0969da", "downpour": "#bc4c00", "easgd": "#8250df"}
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Curve(NamedTuple):
    """One line of a panel: pairs of place and accuracy in percent."""

    label: str
    colour: str
    dash: str
    points: Sequence[tuple[float, float]]


def draw(tuning: Sequence[ClaimRun], runs: Sequence[ClaimRun], names: Mapping[str, str]) -> str:
    """Both panels, and a key below them; `names` of the systems."""
    searched = [
        Curve(
            f"{names[run.system]}, momentum {run.momentum:g}{run.more.replace(':', ', ')}",
            COLOURS[run.system],
            "" if run.momentum and not run.more else "5 3" if not run.momentum else "1.5 2.5",
            sorted((r.rate, 100 * r.value) for r in tuning if r.line == run.line),
        )
        for run in {run.line: run for run in tuning}.values()
    ]
    trained = [
        Curve(names[system], colour, "", _mean_curve([run for run in runs if run.system == system]))
        for system, colour in COLOURS.items()
    ]
    left = _panel(
        0, "accuracy by highest learning rate, %", searched, math.log10, [RATES[0], 0.005, 0.05, 0.5]
    )
    longest = max(seconds for curve in trained for seconds, _ in curve.points)
    spacing = 10.0 ** math.floor(math.log10(longest)) / 2
    ticks = [spacing * place for place in range(int(longest / spacing) + 1)]
    right = _panel(PANEL_WIDTH, "accuracy by seconds, best settings, other seeds, %", trained, float, ticks)
    key = list[str]()
    for place, curve in enumerate(searched):
        x, y = LEFT + 250 * (place % 3), HEIGHT - BOTTOM + 38 + 16 * (place // 3)
        key.append(_line([(x, y - 4), (x + 22, y - 4)], curve))
        key.append(_text(x + 28, y, curve.label, TEXT))
    width, height = 2 * PANEL_WIDTH, HEIGHT + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join([*left, *right, *key])
        + "\n</svg>\n"
    )


def _mean_curve(runs: Sequence[ClaimRun]) -> list[tuple[float, float]]:
    """Over the seeds, at the ends of epochs that all of them reached."""
    ends = min(len(run.values) for run in runs)
    return [
        (statistics.mean(r.seconds[at] for r in runs), 100 * statistics.mean(r.values[at] for r in runs))
        for at in range(ends)
    ]


def _panel(
    left: float, title: str, curves: Sequence[Curve], scale: Callable[[float], float], ticks: Sequence[float]
) -> list[str]:
    places = [scale(x) for curve in curves for x, _ in curve.points] + [scale(tick) for tick in ticks]
    low, high = min(places), max(places)
    most = 10 * math.ceil(max(y for curve in curves for _, y in curve.points) / 10)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - low) / (high - low)
        return (
            left + LEFT + share * (PANEL_WIDTH - LEFT - GAP),
            HEIGHT - BOTTOM - y / most * (HEIGHT - BOTTOM - TOP),
        )

    parts = [_text(left + LEFT, TOP - 18, title, TEXT, ' font-weight="600"')]
    for accuracy in range(0, most + 1, 10):
        y = at(ticks[0], accuracy)[1]
        parts.append(f'<path d="M{left + LEFT},{y:.1f}H{left + PANEL_WIDTH - GAP}" stroke="{GRID}"/>')
        parts.append(_text(left + LEFT - 6, y + 4, str(accuracy), QUIET, ' text-anchor="end"'))
    for tick in ticks:
        x = at(tick, 0)[0]
        parts.append(_text(x, HEIGHT - BOTTOM + 16, f"{tick:.3g}", QUIET, ' text-anchor="middle"'))
    for curve in curves:
        spots = [at(*point) for point in curve.points]
        parts.append(_line(spots, curve))
        for (x, y), point in zip(spots, curve.points, strict=True):
            told = escape(f"{curve.label}: {point[1]:.1f} % at {point[0]:.3g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{curve.colour}">'
                f"<title>{told}</title></circle>"
            )
    return parts


def _line(spots: Sequence[tuple[float, float]], curve: Curve) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
    return f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="1.6"{dash}/>'


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{more}>{escape(text)}</text>'
