"""How the command line writes: data on stdout, the rest on stderr, numbers in units people read."""

from __future__ import annotations

import sys


def fail(message: str, hint: str = "", *, status: int = 1) -> int:
    """Write one error, with what to do about it, to stderr; return the exit status."""
    sys.stderr.write(f"error: {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return status


def note(text: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def as_bytes(count: float) -> str:
    """
    >>> as_bytes(0), as_bytes(230_346), as_bytes(4.2e9)
    ('0 B', '230 kB', '4.20 GB')
    """
    if count < 999.5:
        return f"{count:.0f} B"
    units = ["kB", "MB", "GB", "TB"]
    count /= 1000
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:,.{digits}f} {units[0]}"


def as_percent(share: float) -> str:
    """
    >>> as_percent(0.9861), as_percent(0.97)
    ('98.6 %', '97 %')
    """
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def as_metric(name: str, value: float) -> str:
    """
    >>> as_metric("accuracy", 0.9861), as_metric("perplexity", 81.234)
    ('98.6 %', '81.23')
    """
    return as_percent(value) if name == "accuracy" else f"{value:.4g}"


def as_duration(seconds: float) -> str:
    """
    >>> as_duration(4.2), as_duration(247), as_duration(7384)
    ('4 s', '4 min 07 s', '2 h 03 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def table(rows: list[tuple[str, str]], *, indent: int = 0) -> str:
    """Two columns, the first as wide as it needs to be."""
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{'':{indent}}{left:{width}}  {right}" for left, right in rows)
