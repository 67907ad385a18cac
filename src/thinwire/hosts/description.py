"""Hosts, the paths between them and their faults, as values that are checked before use; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from thinwire.errors import SettingError, check, check_one_of
from thinwire.hosts.quantities import (
    MOST,
    check_rate,
    format_rate,
    parse_duration,
    parse_rate,
    parse_rates,
    whole,
)

FAULT_KINDS = {
    "kill": "the worker dies at once (SIGKILL)",
    "pause": "the worker is stopped (SIGSTOP)",
    "slow": "the host computes at `speed` times its full speed",
    "cut": "the path of the host, or of the whole site, is down",
    "heal": "a pause, slow or cut is over",
    "rejoin": "a killed worker starts again",
}
_FAULT_HINT = "for example kill:host=3,step=20 or cut:site=1,after=5s,seconds=10s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine, emulated or simulated, with one worker."""

    index: int
    rate_bit_per_s: float
    """Bandwidth of its path, in each direction."""
    site: int = 0
    speed: float = 1.0
    """Relative speed of computing: 0.5 takes twice as long."""

    @property
    def name(self) -> str:
        return f"host{self.index}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.index + 1}"


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
        check_one_of("fault", self.kind, FAULT_KINDS)
        name, shown = self.kind, str(self)
        placed_once = (self.host is None) != (self.site is None)
        check(placed_once, "fault", "given one host= or site=", shown, hint=_FAULT_HINT)
        check(self.site is None or name in ("cut", "heal"), "fault site", "used with cut or heal", name)
        timed_once = (self.step is None) != (self.after_s is None)
        check(timed_once, "fault", "given one step= or after=", shown, hint=_FAULT_HINT)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Hosts on shaped paths, grouped into sites; the paths between sites share one uplink per site."""

    hosts: tuple[Host, ...]
    uplink_bit_per_s: float | None = None
    """Bandwidth of each site's uplink, in each direction; only with several sites."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.hosts)
        check(count >= 1, "hosts", "at least 1", count)
        assert [host.index for host in self.hosts] == list(range(count))
        for host in self.hosts:
            check_rate(host.rate_bit_per_s, field=f"rate of host {host.index}")
            check(0 < host.speed <= 1, f"speed of host {host.index}", "above 0 and at most 1", host.speed)
        several, uplink = self.num_sites > 1, self.uplink_bit_per_s
        hint = "add --uplink 50mbit" if several else "add --sites 4+4, or leave --uplink out"
        rule = "given with several sites, and only then"
        check(several == (uplink is not None), "uplink", rule, uplink, hint=hint)
        if uplink is not None:
            check_rate(uplink, field="uplink")
        killed = {fault.host for fault in self.faults if fault.kind == "kill"}
        for fault in self.faults:
            at, site, hint = fault.host, fault.site, str(fault)
            check(at is None or 0 <= at < count, "fault host", f"0 to {count - 1}", at, hint=hint)
            check(site is None or several, "fault site", "used with several sites", site, hint=hint)
            last = self.num_sites - 1
            check(site is None or 0 <= site <= last, "fault site", f"0 to {last}", site, hint=hint)
            rejoins = fault.kind == "rejoin"
            check(not rejoins or at in killed, "fault rejoin", "of a host that is killed before", hint)

    @property
    def num_sites(self) -> int:
        return 1 + max(host.site for host in self.hosts)

    def scaled(self, factor: float) -> Description:
        """The same hosts with all rates multiplied; to be used with a net scaled alike."""
        hosts = tuple(replace(host, rate_bit_per_s=host.rate_bit_per_s * factor) for host in self.hosts)
        uplink = self.uplink_bit_per_s
        return replace(self, hosts=hosts, uplink_bit_per_s=None if uplink is None else uplink * factor)

    def summary(self) -> str:
        """Describe the hosts in one line: `8 hosts at 200mbit, 2 sites with uplinks of 50mbit`."""
        rates = sorted({host.rate_bit_per_s for host in self.hosts})
        words = f"{len(self.hosts)} hosts at {' and '.join(map(format_rate, rates))}"
        if self.uplink_bit_per_s is not None:
            words += f", {self.num_sites} sites with uplinks of {format_rate(self.uplink_bit_per_s)}"
        slow = [host for host in self.hosts if host.speed < 1]
        if slow:
            words += ", slow: " + ", ".join(f"host {host.index} at {host.speed:g}" for host in slow)
        return words


def describe(
    *,
    hosts: int,
    rate: str,
    sites: str | None = None,
    uplink: str | None = None,
    slow: Sequence[str] = (),
    faults: Sequence[str] = (),
) -> Description:
    """Read a description from the strings of the command line.

    >>> describe(hosts=8, rate="1gbit*6,100mbit*2", sites="4+4", uplink="50mbit", slow=["3=0.5"]).summary()
    '8 hosts at 100mbit and 1gbit, 2 sites with uplinks of 50mbit, slow: host 3 at 0.5'
    """
    check(1 <= hosts <= MOST, "hosts", f"1 to {MOST:,}", hosts)
    each = zip(_rates(rate, hosts), _sites(sites, hosts), _speeds(slow, hosts), strict=True)
    return Description(
        hosts=tuple(
            Host(index=index, rate_bit_per_s=rate, site=site, speed=speed)
            for index, (rate, site, speed) in enumerate(each)
        ),
        uplink_bit_per_s=None if uplink is None else parse_rate(uplink, field="uplink"),
        faults=tuple(parse_fault(text) for text in faults),
    )


def _rates(text: str, hosts: int) -> list[float]:
    rates = parse_rates(text)
    if len(rates) == 1 and "*" not in text:
        return rates * hosts
    hint = "one rate for all, or as many as hosts: 1gbit*6,100mbit*2"
    check(len(rates) == hosts, "rate", f"given for {hosts} hosts", f"{text} ({len(rates)})", hint=hint)
    return rates


def _sites(text: str | None, hosts: int) -> list[int]:
    if text is None:
        return [0] * hosts
    counts = [whole(word, "sites", "made of whole numbers", text) for word in text.split("+")]
    check(min(counts) >= 1, "sites", "at least one host each", text)
    check(sum(counts) == hosts, "sites", f"{hosts} hosts in sum", text, hint="4+4 puts 8 hosts on two sites")
    return [site for site, count in enumerate(counts) for _ in range(count)]


def _speeds(words: Sequence[str], hosts: int) -> list[float]:
    speeds: dict[int, float] = {}
    for word in words:
        host, _, speed = word.partition("=")
        index = whole(host, "slow", "made of whole numbers", word)
        check(0 <= index < hosts, "slow", f"a host from 0 to {hosts - 1}", word)
        check(index not in speeds, "slow", "given once per host", word)
        try:
            speeds[index] = float(speed)
        except ValueError:
            speeds[index] = math.nan
        check(0 < speeds[index] <= 1, "slow", "HOST=SPEED with a speed above 0 and at most 1", word)
    return [speeds.get(index, 1.0) for index in range(hosts)]


def parse_fault(text: str) -> Fault:
    """Read `kind:name=value,...`; a time without a unit is in seconds.

    >>> str(parse_fault("pause:host=3,step=20,seconds=500ms"))
    'pause:host=3,step=20,seconds=0.5'
    """
    kind, _, rest = text.strip().partition(":")
    check_one_of("fault", kind, FAULT_KINDS)
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
            raise SettingError(f"fault {name} must be a number, got {value!r}", hint=_FAULT_HINT) from None
    if "after" in settings:
        settings["after_s"] = settings.pop("after")
    return Fault(kind=kind, **settings)
