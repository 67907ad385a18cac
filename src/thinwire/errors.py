"""Every error thinwire raises on purpose.

ThinwireError
|-- SettingError      a setting is wrong (also a ValueError): field, rule, value
|-- UsageError        a call in an order or a place where it cannot work (also a RuntimeError)
|-- DataError         data or a file is missing, damaged or not what it claims to be
|-- MissingExtra      an optional dependency is not installed (also an ImportError)
|-- NumericError      NaN or infinity where numbers were expected
`-- PeerError         something is wrong with another worker; carries its rank and host
    |-- PeerLost      it died, left with an error, or fell silent
    |-- PeerLate      it is alive but did not come in time
    `-- PeerDiffers   it holds another model, or does another operation
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class ThinwireError(Exception):
    """Base of all errors raised on purpose; `hint` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class SettingError(ThinwireError, ValueError):
    """A setting is wrong; the message names field, rule and value."""


class UsageError(ThinwireError, RuntimeError):
    """A call came in an order or a place where it cannot work."""


class DataError(ThinwireError):
    """Data or a file is missing, damaged, or not what it claims to be."""


class MissingExtra(ThinwireError, ImportError):
    """An optional dependency is not installed."""


class NumericError(ThinwireError):
    """NaN or infinity where numbers were expected."""


class PeerError(ThinwireError):
    """Something is wrong with another worker."""

    def __init__(self, message: str, *, rank: int | None = None, host: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.host = host


class PeerLost(PeerError):
    """A worker died, left with an error, or fell silent."""


class PeerLate(PeerError):
    """A worker is alive but did not come in time."""


class PeerDiffers(PeerError):
    """A worker holds another model, or does another operation, than this one."""


def check(condition: bool, field: str, rule: str, value: object, *, hint: str = "") -> None:
    """Raise SettingError unless `condition`: the one form in which settings are refused."""
    if not condition:
        raise SettingError(f"{field} must be {rule}, got {value!r}", hint=hint)


def check_seconds(field: str, value: object) -> None:
    """Raise SettingError unless `value` is a positive number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    check(number and 0 < value < math.inf, field, "a positive number of seconds", value)  # type: ignore[operator]  # a number


def check_count(field: str, value: object, unit: str) -> None:
    """Raise SettingError unless `value` is a positive whole number."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    check(whole and value > 0, field, f"a positive whole number of {unit}", value)  # type: ignore[operator]  # a number


def check_one_of(field: str, value: object, allowed: Iterable[object]) -> None:
    """Raise SettingError unless `value` is among `allowed`, naming them."""
    options = list(allowed)
    check(value in options, field, "one of " + ", ".join(repr(o) for o in options), value)
