"""Failures as data: what happens to which host, and when; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from thinwire.errors import SettingError, check, check_one_of

KINDS = {
    "kill": "the worker dies at once (SIGKILL)",
    "pause": "the worker is stopped (SIGSTOP)",
    "slow": "the host computes at `speed` times its full speed",
    "cut": "the path of the host, or of the whole site, is down",
    "heal": "a pause, slow or cut is over",
    "rejoin": "a killed worker starts again",
}
_HINT = "for example kill:host=3,step=20 or cut:site=1,after=5,seconds=10"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One event. With `seconds` a pause, slow or cut ends by itself; without, it lasts until `heal`."""

    kind: str
    host: int | None = None
    """The host it happens to."""
    site: int | None = None
    """Instead of a host, for cut and heal: the uplink of this site."""
    step: int | None = None
    """Happens when the host's worker (once it is gone: the furthest one) has done this many steps."""
    after_s: float | None = None
    """Instead of a step: this many seconds after the workers were started."""
    seconds: float | None = None
    """How long a pause, slow or cut lasts."""
    speed: float | None = None
    """For slow: 0.5 takes twice as long."""

    def __post_init__(self) -> None:
        check_one_of("fault", self.kind, KINDS)
        check(
            (self.host is None) != (self.site is None),
            "fault",
            "given one host= or site=",
            str(self),
            hint=_HINT,
        )
        check(
            self.site is None or self.kind in ("cut", "heal"),
            "fault site",
            "used with cut or heal",
            self.kind,
        )
        both = (self.step is None) != (self.after_s is None)
        check(both, "fault", "given one step= or after=", str(self), hint=_HINT)
        check(self.step is None or self.step >= 0, "fault step", "0 or more", self.step)
        _check_seconds("after", self.after_s)
        _check_seconds("seconds", self.seconds)
        lasting = self.kind in ("pause", "slow", "cut")
        check(self.seconds is None or lasting, "fault seconds", "used with pause, slow or cut", self.kind)
        check(
            (self.speed is not None) == (self.kind == "slow"), "fault speed", "given for slow only", str(self)
        )
        check(self.speed is None or 0 < self.speed <= 1, "fault speed", "above 0 and at most 1", self.speed)

    def __str__(self) -> str:
        given = {_KEYS.get(f.name, f.name): getattr(self, f.name) for f in fields(self)[1:]}
        words = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"{self.kind}:{','.join(words)}"


_KEYS = {"after_s": "after"}


def _check_seconds(name: str, value: float | None) -> None:
    check(value is None or 0 <= value < math.inf, f"fault {name}", "seconds, 0 or more", value)


def parse_fault(text: str) -> Fault:
    """Read `kind:name=value,...`.

    >>> str(parse_fault("kill:host=3,step=20"))
    'kill:host=3,step=20'
    """
    kind, _, rest = text.strip().partition(":")
    check_one_of("fault", kind, KINDS)
    settings: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        name, _, value = word.partition("=")
        check_one_of("fault field", name, ("host", "site", "step", "after", "seconds", "speed"))
        check(name not in settings, f"fault {name}", "given once", text)
        settings[name] = _number(name, value)
    if "after" in settings:
        settings["after_s"] = settings.pop("after")
    return Fault(kind=kind, **settings)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if name in ("host", "site", "step") else float(text)
    except ValueError:
        raise SettingError(f"fault {name} must be a number, got {text!r}", hint=_HINT) from None
