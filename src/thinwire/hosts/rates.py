"""Bandwidth as people write it: `100mbit`, `2.5gbit`; no torch."""

from __future__ import annotations

import math
import re

from thinwire.errors import check

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(?P<number>[0-9.]+(e[0-9]+)?)\s*(?P<unit>[kmg]?bit)(/s)?", re.IGNORECASE)
LOWEST_BIT_PER_S = 8_000.0
"""Below 1 kB/s a single packet takes seconds and nothing useful can be tried."""
HIGHEST_BIT_PER_S = 100e9


def parse_rate(text: str, *, field: str = "rate") -> float:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000.0
    """
    found = _RATE.fullmatch(text.strip())
    hint = "a number with kbit, mbit or gbit: 100mbit, 2.5gbit"
    check(found is not None, field, "a bandwidth", text, hint=hint)
    assert found is not None
    try:
        rate = float(found["number"]) * _UNITS[found["unit"].lower()]
    except ValueError:
        rate = math.nan
    return check_rate(rate, field=field, given=text)


def check_rate(bit_per_s: float, *, field: str = "rate", given: object = None) -> float:
    """Refuse a rate that cannot be shaped."""
    rule = f"between {format_rate(LOWEST_BIT_PER_S)} and {format_rate(HIGHEST_BIT_PER_S)}"
    shown = bit_per_s if given is None else given
    check(LOWEST_BIT_PER_S <= bit_per_s <= HIGHEST_BIT_PER_S, field, rule, shown)
    return bit_per_s


def format_rate(bit_per_s: float) -> str:
    """The shortest way to write a rate that reads back the same to four digits.

    >>> format_rate(100e6)
    '100mbit'
    """
    for unit in ("gbit", "mbit", "kbit"):
        if bit_per_s >= _UNITS[unit]:
            return f"{bit_per_s / _UNITS[unit]:.4g}{unit}"
    return f"{bit_per_s:.4g}bit"
