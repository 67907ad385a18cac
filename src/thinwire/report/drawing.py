"""Figures with matplotlib.

A system has one colour in every plot of a page: ours are saturated, rivals muted, the ceiling has the colour
of the text. In a page every colour is a CSS variable, so that it can change with the reader's theme; in an
image file it is the light one.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from thinwire.errors import MissingExtra
from thinwire.timings import Family

if TYPE_CHECKING:  # an extra
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

_PALETTE = {  # light, dark; neighbours differ in lightness too, for readers who see few hues
    "ours": (
        "#0b62a4 #d9541e #0b8a6a #8a3c9c #b07d00 #0891b2 #a3123f #4b4fc4",
        "#58a6ff #ff8b5e #3fcf9f #d38bea #f0c04a #6fdcf5 #ff7a9c #a5a8ff",
    ),
    "rival": (
        "#5d6976 #8a6d49 #76889b #5f7558 #96758a #4f7386 #837a55 #6f6384",
        "#98a4b3 #c9b08f #6f8196 #a6b8a0 #a8899a #8fb4c9 #a89c74 #b3a8c4",
    ),
}
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#5a636e", "#9aa4af"),
    "grid": ("#dfe3e8", "#2b323b"),
    "compute": ("#b7c0ca", "#566371"),
    "paper": ("#ffffff", "#10151b"),
    **{
        f"{family}-{number}": pair
        for family, shades in _PALETTE.items()
        for number, pair in enumerate(zip(*map(str.split, shades), strict=True), 1)
    },
}
"""Light and dark, by name of the CSS variable."""
INK, MUTED, GRID, COMPUTE, PAPER = (COLOURS[name][0] for name in ("ink", "muted", "grid", "compute", "paper"))
Label = tuple[float, str, str]
"""Height in data units, text and colour."""
Part = tuple[float, str]
"""Length and colour."""
MARKERS = "osD^vPX*"
DASHES = ((), (4, 1.5), (1, 1.5), (6, 1.5, 1, 1.5))
THICK = 0.62
"""Thickness of a bar; a row is 1."""
WIDTH_INCHES = 4.7
PNG_DPI = 170
LONGEST_LINE = 18
"""Most characters in a line of a label."""
LINE_SHARE = 0.045
"""Height of a line of text, relative to the axes."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "thinwire",  # same events, same bytes
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wide: other fonts fit where it fits
    "font.size": 8.5,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width", "grid.linewidth"), 0.7),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAPER),
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "hatch.linewidth": 1.2,
}


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    marker: str
    width: float


Looks = Mapping[str, Look]


def looks_of(systems: Iterable[tuple[str, Family]]) -> Looks:
    """A look for each system, by family and in the order given; after eight of a family colours repeat."""
    found: dict[str, Look] = {}
    used: Counter[str] = Counter()
    for system, family in dict.fromkeys(systems):
        colour = INK if family == "ceiling" else COLOURS[f"{family}-{used[family] % 8 + 1}"][0]
        marker = "" if family == "ceiling" else MARKERS[used[family] % len(MARKERS)]
        found[system] = Look(colour, marker, {"ceiling": 0.9, "ours": 2.0, "rival": 1.2}[family])
        used[family] += 1
    return found


@dataclass(slots=True)
class Plot:
    """A figure with its title and caption, and tips that its parts show under the pointer."""

    name: str
    """The name of its files."""
    title: str
    """The quantity shown."""
    about: str
    """The recipe or cell it is shown for."""
    caption: str
    """A hint on how to read it."""
    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Artist, words: str) -> None:
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = words


@contextmanager
def style() -> Iterator[None]:
    """Draw figures in our style within the block, without changing matplotlib's settings outside."""
    try:
        import matplotlib.figure
    except ImportError as error:
        message = f"plots need a package that is not installed ({error})"
        raise MissingExtra(message, hint="pip install 'thinwire[report]'") from None
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a browser has more fonts
        yield


def new_plot(name: str, title: str, about: str, caption: str, *, height_inches: float = 3.0) -> Plot:
    """An empty panel; characters that a file name or an id cannot hold become dashes."""
    from matplotlib.figure import Figure

    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return Plot(slug, title, about, caption, figure, figure.add_subplot())


def wrapped(label: str) -> str:
    """A name on as many lines as it needs, broken where its parts end.

    >>> wrapped("all-reduce:overlap=forward, 2 workers")
    'all-reduce:\\noverlap=forward,\\n2 workers'
    """
    lines = [""]
    for part in filter(None, re.findall(r"\(?[^:,(]*[:,]?\s*", label)):
        if lines[-1] and len((lines[-1] + part).rstrip()) > LONGEST_LINE:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def end_labels(axes: Axes, ends: Sequence[Label]) -> None:
    """Write labels at the right of the axes, whose limits are final, each as near to its height as fits."""
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = [(wrapped(text), colour) for _, text, colour in sorted(ends)]
    heights = [float(to_axes.transform((1.0, height))[1]) for height, _, _ in sorted(ends)]
    needed = [LINE_SHARE * (text.count("\n") + 1.3) for text, _ in labels]
    for (text, colour), place in zip(labels, spread_out(heights, needed), strict=True):
        axes.text(
            1.02, place, text, transform=axes.transAxes, va="center", color=colour, size=7.5, linespacing=1
        )


def spread_out(wanted: Sequence[float], needed: Sequence[float]) -> list[float]:
    """Places for labels of some heights, in order, none on another, within 0 to 1 if they fit.

    >>> spread_out([0.5, 0.5], [0.2, 0.2])
    [0.4, 0.6]
    """
    groups: list[tuple[float, list[float]]] = []  # middle and heights of labels that touch
    for place, height in zip(wanted, needed, strict=True):
        middle, heights = place, [height]
        while True:
            half = sum(heights) / 2
            middle = min(max(middle, half), max(1 - half, half))
            if not groups or groups[-1][0] + sum(groups[-1][1]) / 2 <= middle - half + 1e-9:
                break
            before, below = groups.pop()
            middle = (before * len(below) + middle * len(heights)) / (len(below) + len(heights))
            heights = below + heights
        groups.append((middle, heights))
    places = []
    for middle, heights in groups:
        edges = accumulate(heights, initial=middle - sum(heights) / 2)
        places += [round(edge + height / 2, 6) for edge, height in zip(edges, heights, strict=False)]
    return places


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


def bar(
    plot: Plot, row: int, parts: Sequence[Part], tip: str, text: str, quartiles: Sequence[float] = ()
) -> Rectangle:
    """Draw a bar of several parts and write `text` behind it and its quartiles; return the last part."""
    left = 0.0
    drawn: list[Rectangle] = []
    for length, colour in parts:
        drawn += plot.axes.barh(row, length, left=left, color=colour, height=THICK)
        plot.tip(drawn[-1], tip)
        left += length
    low, high = quartiles or (left, left)
    if low < high:  # it was measured more than once
        plot.axes.plot([low, high], [row, row], color=INK, linewidth=0.9)
    plot.axes.annotate(
        text, (high, row), xytext=(4, 0), textcoords="offset points", va="center", color=MUTED, fontsize=7.5
    )
    return drawn[-1]
