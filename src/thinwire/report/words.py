"""Names of places and things, as titles and file names need them."""

from __future__ import annotations

from thinwire.report.timings import Cell
from thinwire.units import as_rate, as_seconds, count


def place(cell: Cell, *, workers: bool = True) -> str:
    """A cell in words.

    >>> place(Cell("resnet50", 200e6, 8))
    'resnet50, 200 Mbit/s, 8 workers'
    """
    rate = [] if cell.rate_bits_per_s is None else [as_rate(cell.rate_bits_per_s)]
    return ", ".join([net_words(cell.net), *rate, *([count(cell.workers, "worker")] if workers else [])])


def net_words(net: str) -> str:
    """A net by its name, or, where it has none, by its size and speed.

    >>> net_words("params=5e6,layers=16,forward=0.1,backward=0.2")
    '5M parameters + 300 ms compute'
    """
    try:
        values = {key: float(value) for key, _, value in (pair.partition("=") for pair in net.split(","))}
        compute = as_seconds(values["forward"] + values["backward"])
        return f"{values['params'] / 1e6:.4g}M parameters + {compute} compute"
    except (ValueError, KeyError):
        return net


def slug(*parts: object) -> str:
    """A name for files and ids."""
    text = "-".join(str(part) for part in parts if part is not None)
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")
