"""The figure of a recipe: accuracy lost against time to accuracy, a panel for each rate; plain SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.map_points import EXACT, MapPoint, frontier
from benchmarks.map_run import RATES
from thinwire.units import three_digits

PANEL_WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 330, 300, 46, 48, 44, 26
TEXT, QUIET, LINE, OTHER, OURS = "#1f2328", "#59636e", "#d0d7de", "#8c959f", "#0969da"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MOST_LINES = 5
"""Lines across a panel, at the most."""
WIDE = 2.2
"""Powers of ten from which on only these are marked on the axis."""
LEAST_LOST = -0.5
LETTER = 5.6
"""Width of a letter of a label, about."""
NAMES = {"20mbit": "20 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


class Panel:
    """One rate: seconds to the target, on a logarithmic scale, to the right; what was lost upwards."""

    def __init__(self, left: float, points: Sequence[MapPoint], most_lost: float) -> None:
        self._left, self._points, self._most_lost = left, points, most_lost
        seconds = [_seconds(point) for point in points]
        self._low, self._high = math.log10(min(seconds) * 0.8), math.log10(max(seconds) * 1.25)

    def _x(self, seconds: float) -> float:
        share = (math.log10(seconds) - self._low) / (self._high - self._low)
        return self._left + LEFT + share * (PANEL_WIDTH - LEFT - GAP)

    def _y(self, lost: float) -> float:
        most = self._most_lost
        least = LEAST_LOST * most / 8
        share = (max(lost, least) - least) / (most - least)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def draw(self, title: str, unit: str) -> list[str]:
        """The panel as SVG elements."""
        best = frontier(self._points)
        parts = [_text(self._left + LEFT, TOP - 14, title, TEXT, ' font-weight="600"'), *self._axes(unit)]
        line = " ".join(f"{self._x(_seconds(p)):.1f},{self._y(p.lost):.1f}" for p in best)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="1.5"/>')
        for point in self._points:
            x, y = self._x(_seconds(point)), self._y(point.lost)
            colour = OURS if point in best else OTHER
            fill = colour if point.to_target_s[0] is not None else "none"
            label = f"{point.strategy}: {point.lost:+.1f}, {three_digits(_seconds(point))} s"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}">'
                f"<title>{escape(label)}</title></circle>"
            )
        return [*parts, *self._labels(best)]

    def _labels(self, best: Sequence[MapPoint]) -> Iterator[str]:
        """Names beside points, those of the frontier first; one that would cover another is left out."""
        places = {id(p): (self._x(_seconds(p)), self._y(p.lost)) for p in self._points}
        taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places.values()]
        for point in sorted(self._points, key=lambda p: (p not in best, _seconds(p))):
            name, (x, y) = short(point.strategy), places[id(point)]
            long = LETTER * len(name)
            above, below = ((x + 7, y - 6), (x - 7 - long, y - 6)), ((x + 7, y + 13), (x - 7 - long, y + 13))
            for left, low in (*below, *above) if point.strategy == EXACT else (*above, *below):
                box = (left, low - 9, left + long, low + 2)
                fits = self._left + LEFT <= left and box[2] <= self._left + PANEL_WIDTH - GAP / 2
                if fits and not any(_meet(box, other) for other in taken):
                    taken.append(box)
                    yield _text(left, low, name, TEXT, ' font-size="10"')
                    break

    def _axes(self, unit: str) -> list[str]:
        parts, right = list[str](), self._left + PANEL_WIDTH - GAP
        for lost in range(0, int(self._most_lost) + 1, spacing(self._most_lost)):
            y = self._y(lost)
            parts.append(f'<path d="M{self._left + LEFT},{y:.1f}H{right}" stroke="{LINE}"/>')
            parts.append(_text(self._left + LEFT - 6, y + 4, str(lost), QUIET, ' text-anchor="end"'))
        for exponent in range(math.floor(self._low), math.ceil(self._high) + 1):
            for digit in (1,) if self._high - self._low > WIDE else (1, 2, 5):
                seconds = digit * 10.0**exponent
                if self._low <= math.log10(seconds) <= self._high:
                    y = HEIGHT - BOTTOM + 16
                    parts.append(_text(self._x(seconds), y, f"{seconds:g}", QUIET, ' text-anchor="middle"'))
        parts.append(_text(self._left + LEFT, HEIGHT - 8, "seconds to accuracy", QUIET))
        parts.append(_text(self._left + 4, TOP - 30, unit, QUIET) if self._left == 0 else "")
        return parts


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def spacing(most_lost: float) -> int:
    """Between two lines: a round number.

    >>> [spacing(most_lost) for most_lost in (2.0, 8.0, 70.0)]
    [1, 2, 20]
    """
    steps = (digit * int(10**exponent) for exponent in range(9) for digit in (1, 2, 5))
    return next(step for step in steps if most_lost / step <= MOST_LINES)


def _seconds(point: MapPoint) -> float:
    first = point.to_target_s[0]
    return point.train_s if first is None else first


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{more}>{escape(text)}</text>'


def short(strategy: str) -> str:
    """A strategy's name and its first setting.

    >>> short("diloco:interval=32:fragments=8")
    'diloco 32'
    """
    name, _, settings = strategy.partition(":")
    value = settings.partition(":")[0].partition("=")[2]
    return f"{name} {value}".strip()


def draw(points: Sequence[MapPoint], unit: str) -> str:
    """One panel for each rate, side by side."""
    parts = list[str]()
    most_lost = 1.1 * max(1.8, *(point.lost for point in points))
    for number, rate in enumerate(RATES):
        here = [point for point in points if point.rate == rate]
        if here:
            parts += Panel(number * PANEL_WIDTH, here, most_lost).draw(NAMES[rate], unit)
    width = len(RATES) * PANEL_WIDTH
    size = f'width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="11">'
    background = f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, background, *filter(None, parts), "</svg>", ""])
