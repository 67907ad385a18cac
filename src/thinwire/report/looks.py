"""Colours: one per system, the same in every plot of a page, light or dark.

Ours are saturated, rivals muted, the ceiling is the colour of the text. In a page every colour is a CSS
variable, so that it can change with the reader's theme; in an image file it is the light one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from thinwire.report.timings import Family

INK = "#1f2328"
MUTED = "#5a636e"
GRID = "#dfe3e8"
COMPUTE = "#b7c0ca"
PAPER = "#ffffff"

# Name of the CSS variable: (light, dark). Neighbours differ in lightness too, for readers who see few hues.
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": (INK, "#e6edf3"),
    "muted": (MUTED, "#9aa4af"),
    "grid": (GRID, "#2b323b"),
    "compute": (COMPUTE, "#566371"),
    "paper": (PAPER, "#10151b"),
    "ours-1": ("#0b62a4", "#58a6ff"),
    "ours-2": ("#d9541e", "#ff8b5e"),
    "ours-3": ("#0b8a6a", "#3fcf9f"),
    "ours-4": ("#8a3c9c", "#d38bea"),
    "ours-5": ("#b07d00", "#f0c04a"),
    "ours-6": ("#0891b2", "#6fdcf5"),
    "ours-7": ("#a3123f", "#ff7a9c"),
    "ours-8": ("#4b4fc4", "#a5a8ff"),
    "rival-1": ("#5d6976", "#98a4b3"),
    "rival-2": ("#8a6d49", "#c9b08f"),
    "rival-3": ("#76889b", "#6f8196"),
    "rival-4": ("#5f7558", "#a6b8a0"),
    "rival-5": ("#96758a", "#a8899a"),
    "rival-6": ("#4f7386", "#8fb4c9"),
    "rival-7": ("#837a55", "#a89c74"),
    "rival-8": ("#6f6384", "#b3a8c4"),
}
MARKERS = "osD^vPX*"
DASHES = ((), (4, 1.5), (1, 1.5), (6, 1.5, 1, 1.5))


@dataclass(frozen=True, slots=True)
class Look:
    """How one system is drawn."""

    colour: str
    marker: str
    width: float


def looks(systems: Iterable[tuple[str, Family]]) -> dict[str, Look]:
    """A look for each system, by family and in the order given; after eight of a family colours repeat."""
    found: dict[str, Look] = {}
    used = {"ours": 0, "rival": 0}
    for system, family in systems:
        if system in found:
            continue
        if family == "ceiling":
            found[system] = Look(INK, "", 0.9)
            continue
        place = used[family]
        used[family] += 1
        colour = COLOURS[f"{family}-{place % 8 + 1}"][0]
        found[system] = Look(colour, MARKERS[place % len(MARKERS)], 2.0 if family == "ours" else 1.2)
    return found


def variables(*, dark: bool) -> str:
    """All colours as CSS declarations."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())
