"""Faults as data: what happens to which host, and when; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from thinwire.errors import SettingError, check, check_one_of
from thinwire.hosts.quantities import parse_duration

KINDS = {
    "kill": "the worker dies at once (SIGKILL)",
    "pause": "the worker is stopped (SIGSTOP)",
    "slow": "the host computes at `speed` times its full speed",
    "cut": "the path of the host, or of the whole site, is down",
    "heal": "a pause, slow or cut is over",
    "rejoin": "a killed worker starts again",
}
_HINT = "for example kill:host=3,step=20 or cut:site=1,after=5s,seconds=10s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. With `seconds` a pause, slow or cut ends by itself; without, it lasts until `heal`."""

    kind: str
    host: int | None = None
    """The host it happens to."""
    site: int | None = None
    """Instead of a host, for cut and heal: the uplink of this site."""
    step: int | None = None
    """Steps of the host's worker (once it is dead: of the furthest worker) before the fault."""
    after_s: float | None = None
    """Instead of a step: seconds since the workers were started."""
    seconds: float | None = None
    """How long a pause, slow or cut lasts."""
    speed: float | None = None
    """For slow: 0.5 takes twice as long."""

    def __post_init__(self) -> None:
        check_one_of("fault", self.kind, KINDS)
        name, shown = self.kind, str(self)
        placed_once = (self.host is None) != (self.site is None)
        check(placed_once, "fault", "given one host= or site=", shown, hint=_HINT)
        check(self.site is None or name in ("cut", "heal"), "fault site", "used with cut or heal", name)
        timed_once = (self.step is None) != (self.after_s is None)
        check(timed_once, "fault", "given one step= or after=", shown, hint=_HINT)
        check(self.step is None or self.step >= 0, "fault step", "0 or more", self.step)
        for field, value in (("after", self.after_s), ("seconds", self.seconds)):
            check(value is None or 0 <= value < math.inf, f"fault {field}", "seconds, 0 or more", value)
        lasting = name in ("pause", "slow", "cut")
        check(self.seconds is None or lasting, "fault seconds", "used with pause, slow or cut", name)
        check((self.speed is not None) == (name == "slow"), "fault speed", "given for slow only", shown)
        check(self.speed is None or 0 < self.speed <= 1, "fault speed", "above 0 and at most 1", self.speed)

    def __str__(self) -> str:
        given = {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self)[1:]}
        words = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"{self.kind}:{','.join(words)}"


def parse_fault(text: str) -> Fault:
    """Read `kind:name=value,...`; a time without a unit is in seconds.

    >>> str(parse_fault("pause:host=3,step=20,seconds=500ms"))
    'pause:host=3,step=20,seconds=0.5'
    """
    kind, _, rest = text.strip().partition(":")
    check_one_of("fault", kind, KINDS)
    settings: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        name, _, value = word.partition("=")
        check_one_of("fault field", name, ("host", "site", "step", "after", "seconds", "speed"))
        check(name not in settings, f"fault {name}", "given once", text)
        if name in ("after", "seconds"):
            settings[name] = parse_duration(value, field=f"fault {name}", unit="s")
            continue
        try:
            settings[name] = float(value) if name == "speed" else int(value)
        except ValueError:
            raise SettingError(f"fault {name} must be a number, got {value!r}", hint=_HINT) from None
    if "after" in settings:
        settings["after_s"] = settings.pop("after")
    return Fault(kind=kind, **settings)
