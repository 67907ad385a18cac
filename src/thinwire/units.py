"""Numbers in units people read, formatted alike on the command line and in the report."""

from __future__ import annotations


def as_bytes(count: float) -> str:
    """Format a number of bytes.

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
    return f"{three_digits(count)} {units[0]}"


def as_percent(share: float) -> str:
    """Format a share of 1.

    >>> as_percent(0.9861), as_percent(0.97)
    ('98.6 %', '97 %')
    """
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def as_metric(name: str, value: float) -> str:
    """Format a test metric.

    >>> as_metric("accuracy", 0.9861), as_metric("perplexity", 81.234)
    ('98.6 %', '81.23')
    """
    return as_percent(value) if name == "accuracy" else f"{value:.4g}"


def as_duration(seconds: float) -> str:
    """Format a waiting time, to the second or minute.

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


def as_seconds(seconds: float) -> str:
    """Format a measured time, to three digits.

    >>> as_seconds(0), as_seconds(0.0453), as_seconds(1.684), as_seconds(247.3)
    ('0 s', '45.3 ms', '1.68 s', '247 s')
    """
    if seconds == 0:
        return "0 s"
    return f"{three_digits(seconds * 1e3)} ms" if seconds < 0.9995 else f"{three_digits(seconds)} s"


def as_rate(bits_per_s: float) -> str:
    """Format a bandwidth.

    >>> as_rate(200e6), as_rate(2.5e9)
    ('200 Mbit/s', '2.5 Gbit/s')
    """
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.4g} {unit}"
    return f"{bits_per_s:.4g} bit/s"


def as_ratio(ratio: float) -> str:
    """Format a speed-up.

    >>> as_ratio(1.214), as_ratio(12.34)
    ('1.21x', '12.3x')
    """
    return f"{three_digits(ratio)}x"


def three_digits(number: float) -> str:
    """Format a number to three digits.

    >>> three_digits(1.2345), three_digits(12.345), three_digits(1234.5)
    ('1.23', '12.3', '1,234')
    """
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{digits}f}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> count(1, "worker"), count(4, "worker")
    ('1 worker', '4 workers')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
