"""Bandwidths, durations and numbers of workers as people write them; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from thinwire.errors import SettingError, check

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
LOWEST_BIT_PER_S = 8_000.0
"""Below 1 kB/s a single packet takes seconds."""
HIGHEST_BIT_PER_S = 100e9
MOST = 100_000
"""Hosts, or workers, in one description."""
LONGEST_S = 366 * 24 * 3600.0
"""No duration is longer than a year."""


def _value(text: str, units: Mapping[str, float], default: str | None = None) -> float | None:
    """Read a number with one of the `units`; None if it is something else."""
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    unit = found and units.get(found[2] or default or "")
    try:
        return float(found[1]) * unit if found and unit else None
    except ValueError:  # 1.2.3
        return None


def whole(word: str, field: str, rule: str, text: str, *, hint: str = "") -> int:
    """Read a whole number that is a part of `text`."""
    try:
        return int(word)
    except ValueError:
        raise SettingError(f"{field} must be {rule}, got {text!r}", hint=hint) from None


def parse_rate(text: str, *, field: str = "rate") -> float:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000.0
    """
    rate = _value(text.strip().removesuffix("/s"), _BITS_PER_S)
    hint = "a number above 0 with kbit, mbit or gbit: 100mbit, 2.5gbit"
    check(rate is not None, field, "a bandwidth", text, hint=hint)
    return check_rate(rate or 0.0, field=field, given=text)


def parse_rates(text: str, *, field: str = "rate") -> list[float]:
    """The rates in a list; `*` repeats one.

    >>> parse_rates("1gbit*2,100mbit")
    [1000000000.0, 1000000000.0, 100000000.0]
    """
    rates: list[float] = []
    for word in text.split(","):
        check(len(rates) < MOST, field, f"given for at most {MOST:,} hosts", text)
        rate, times, count = word.partition("*")
        repeat = whole(count, field, "repeated a whole number of times", text) if times else 1
        check(1 <= repeat <= MOST, field, f"repeated 1 to {MOST:,} times", text)
        rates += [parse_rate(rate, field=field)] * repeat
    return rates


def check_rate(bit_per_s: float, *, field: str = "rate", given: object = None) -> float:
    """Return the rate; refuse one that cannot be shaped."""
    rule = f"between {format_rate(LOWEST_BIT_PER_S)} and {format_rate(HIGHEST_BIT_PER_S)}"
    shown = bit_per_s if given is None else given
    check(LOWEST_BIT_PER_S <= bit_per_s <= HIGHEST_BIT_PER_S, field, rule, shown)
    return bit_per_s


def format_rate(bit_per_s: float) -> str:
    """Write a rate such that it reads back the same to four digits.

    >>> format_rate(100e6)
    '100mbit'
    """
    unit = next((unit for unit in ("gbit", "mbit", "kbit") if bit_per_s >= _BITS_PER_S[unit]), "bit")
    return f"{bit_per_s / _BITS_PER_S[unit]:.4g}{unit}"


def parse_duration(text: str, *, field: str, unit: Literal["s"] | None = None) -> float:
    """Seconds; a number without a unit is refused, or taken in `unit`.

    >>> parse_duration("0.4ms", field="latency")
    0.0004
    """
    seconds = _value(text, _SECONDS, unit)
    hint = "a number with us, ms, s, min or h, without a sign: 0.4ms, 0.2s"
    if seconds is None:
        raise SettingError(f"{field} must be a time, got {text!r}", hint=hint)
    check(seconds <= LONGEST_S, field, "at most a year (8784h)", text)
    return seconds


def parse_counts(text: str, *, field: str = "workers") -> list[int]:
    """The counts in a list; `..` doubles from the first to the last.

    >>> parse_counts("4,6"), parse_counts("4..32")
    ([4, 6], [4, 8, 16, 32])
    """
    counts: list[int] = []
    for word in text.split(","):
        low, dots, high = word.partition("..")
        first, last = (whole(w, field, "64, 4,16 or 4..64", text) for w in (low, high if dots else low))
        check(1 <= first <= MOST and 1 <= last <= MOST, field, f"from 1 to {MOST:,}", text)
        check(first <= last, field, "a smaller number before .. than after it", text)
        while first < last:
            counts.append(first)
            first *= 2
        counts.append(last)
    return list(dict.fromkeys(counts))
