"""Times as people write them: `0.4ms`, `0.2s`; no torch."""

from __future__ import annotations

import math
import re

from thinwire.errors import check

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"(?P<number>[0-9.]+(e-?[0-9]+)?)\s*(?P<unit>us|ms|s|min)", re.IGNORECASE)


def parse_duration(text: str, *, field: str) -> float:
    """Seconds.

    >>> parse_duration("0.4ms", field="latency")
    0.0004
    """
    found = _DURATION.fullmatch(text.strip())
    check(found is not None, field, "a time", text, hint="a number with us, ms, s or min: 0.4ms, 0.2s")
    assert found is not None
    try:
        seconds = float(found["number"]) * _UNITS[found["unit"].lower()]
    except ValueError:
        seconds = math.nan
    check(0 <= seconds < math.inf, field, "a time, 0 or more", text)
    return seconds
