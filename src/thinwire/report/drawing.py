"""Figures with matplotlib, as files and as SVG that lives inside a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import MissingExtra
from thinwire.report.looks import COLOURS, GRID, INK, MUTED, PAPER
from thinwire.report.markup import Html

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 4.7
PNG_DPI = 170
LONGEST_LINE = 18
"""Characters in a line of a label."""
LINE_SHARE = 0.045
"""Height of a line of text, of the axes."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "thinwire",  # the same events give the same bytes
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wide: other fonts fit where it fits
    "font.size": 8.5,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 1.2,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
}


def check_installed() -> None:
    """Raise MissingExtra if matplotlib is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"plots need a package that is not installed ({error})", hint="pip install 'thinwire[report]'"
        ) from None


@dataclass(slots=True)
class Plot:
    """One figure on its way: what it is called, what it shows, what its parts say when pointed at."""

    name: str
    """Of its files."""
    title: str
    """What it shows,"""
    about: str
    """and of what."""
    caption: str
    """How to read it."""
    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Artist, words: str) -> None:
        """Let a part of the figure say something when pointed at."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = words


@contextmanager
def style() -> Iterator[None]:
    """Within, figures look like ours; nothing outside is changed."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a browser has more fonts
        yield


def new_plot(name: str, title: str, about: str, caption: str, *, height_inches: float = 3.0) -> Plot:
    """An empty panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return Plot(name, title, about, caption, figure, figure.add_subplot())


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


def end_labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write labels at the right of the axes, each as near to its height as the others allow.

    `ends` holds heights in data units, texts and colours; the limits of the axes must be final.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = [(wrapped(text), colour) for _, text, colour in sorted(ends)]
    heights = [float(to_axes.transform((1.0, height))[1]) for height, _, _ in sorted(ends)]
    needed = [LINE_SHARE * (text.count("\n") + 1.3) for text, _ in labels]
    for (text, colour), place in zip(labels, spread_out(heights, needed), strict=True):
        axes.annotate(
            text,
            (1.02, place),
            xycoords="axes fraction",
            va="center",
            color=colour,
            fontsize=7.5,
            linespacing=1.0,
            annotation_clip=False,
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
        edge = middle - sum(heights) / 2
        for height in heights:
            places.append(round(edge + height / 2, 6))
            edge += height
    return places


def save(plot: Plot, folder: Path) -> Html:
    """Write the plot as SVG and PNG, and return it as a part of a page, where the page says the title."""
    drawn = io.StringIO()
    plot.figure.savefig(drawn, format="svg", metadata={"Date": None})
    plot.figure.suptitle(f"{plot.title}\n{plot.about}", x=0.02, ha="left", fontsize=9)
    plot.figure.set_size_inches(WIDTH_INCHES, plot.figure.get_figheight() + 0.35)
    plot.figure.savefig(folder / f"{plot.name}.png", dpi=PNG_DPI)
    plot.figure.savefig(folder / f"{plot.name}.svg", metadata={"Date": None})
    return inline(drawn.getvalue(), plot)


def inline(svg: str, plot: Plot) -> Html:
    """An SVG file as a part of a page: no reference outward, ids that occur once, colours of the theme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", lambda m: _head(plot, m[1]), svg, count=1)
    svg = svg.replace("xlink:href", "href")
    for name, words in plot.tips.items():
        svg = svg.replace(f'<g id="{name}">', f"<g><title>{escape(words)}</title>")
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg))
    kept = {one or other for one, other in used}
    svg = re.sub(r" id=\"([^\"]+)\"", lambda m: f' id="{plot.name}-{m[1]}"' if m[1] in kept else "", svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{plot.name}-\1)", svg)
    svg = re.sub(r"href=\"#([^\"]+)\"", rf'href="#{plot.name}-\1"', svg)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    return Html(svg)


def _head(plot: Plot, view_box: str) -> str:
    # to a screen reader the SVG is one image; without a size of its own it fits the width it is given
    return f'<svg role="img" aria-label="{escape(plot.title)}, {escape(plot.about)}" {view_box}>'
