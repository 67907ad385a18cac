"""Faults at random times from a seed, such that a majority of those who live can always be heard of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import check, check_one_of
from thinwire.hosts.description import Fault

KINDS = {
    "kill": "a worker dies at once (SIGKILL)",
    "rejoin": "a killed worker is started again, and joins",
    "freeze": "a worker stands still for a while (SIGSTOP, SIGCONT)",
    "slow": "a worker gets half of the time, or less, for a while",
    "cut": "the path of a host is down for a while (lab)",
    "partition": "the last site is cut off for a while (lab)",
}
IN_LAB = ("cut", "partition")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Settings from which faults are drawn."""

    workers: int
    count: int
    kinds: tuple[str, ...]
    seed: int = 0
    begin_s: float = 5.0
    """Time of the first fault."""
    every_s: float = 5.0
    """Mean time between two faults."""
    silence_s: float = 10.0
    """`silence_s` of the script's `attach`: pauses last up to one and a half times as long, so that some are
    noticed and some are forgiven."""
    sites: int = 1

    def __post_init__(self) -> None:
        check(self.workers >= 2, "workers", "2 or more", self.workers)
        check(self.count >= 1, "count", "1 or more faults", self.count)
        for kind in self.kinds:
            check_one_of("kind", kind, KINDS)
        check(bool(self.kinds), "kinds", "at least one", self.kinds)
        check(self.every_s > 0, "every", "above 0 seconds", self.every_s)
        check("partition" not in self.kinds or self.sites > 1, "kinds", "without partition on one site", "")
        only_back = set(self.kinds) == {"rejoin"}
        check(not only_back, "kinds", "something that kills, besides rejoin", self.kinds)

    def draw(self) -> list[Fault]:
        """The faults, in order of time. The same settings give the same faults."""
        dice, now_s, found = random.Random(self.seed), self.begin_s, list[Fault]()
        dead: list[int] = []
        quiet_until_s = 0.0
        while len(found) < self.count:
            alive = [host for host in range(self.workers) if host not in dead]
            kind = dice.choice(self._possible(alive, dead, quiet=now_s < quiet_until_s))
            if kind == "":
                now_s = quiet_until_s
                continue
            fault = self._fault(kind, round(now_s, 2), dice, alive, dead)
            found.append(fault)
            if kind in ("freeze", "cut", "partition"):
                # until it is over, and whoever was left out has come back
                quiet_until_s = now_s + (fault.seconds or 0.0) + self.silence_s / 2
            now_s += max(0.1, min(4 * self.every_s, dice.expovariate(1 / self.every_s)))
        return found

    def _possible(self, alive: Sequence[int], dead: Sequence[int], *, quiet: bool) -> list[str]:
        """While somebody may be silent, nobody dies or falls silent too: one fault is judged at a time."""
        able = {
            "kill": len(alive) > max(2, self.workers // 2) and not quiet,
            "rejoin": bool(dead) and not quiet,
            "slow": True,
            "freeze": len(alive) > 2 and not quiet,
            "cut": len(alive) > 2 and not quiet,
            "partition": not dead and not quiet,
        }
        return [kind for kind in self.kinds if able[kind]] or [""]

    def _fault(self, kind: str, at_s: float, dice: random.Random, alive: list[int], dead: list[int]) -> Fault:
        lasts_s = round(dice.uniform(0.1, 1.5) * self.silence_s, 2)
        if kind == "rejoin":
            host = dead.pop(dice.randrange(len(dead)))
            return Fault(kind="rejoin", host=host, after_s=at_s)
        if kind == "partition":
            return Fault(kind="cut", site=self.sites - 1, after_s=at_s, seconds=lasts_s)
        host = dice.choice(alive)
        if kind == "kill":
            dead.append(host)
            return Fault(kind="kill", host=host, after_s=at_s)
        if kind == "slow":
            speed = round(dice.uniform(0.2, 0.5), 2)
            return Fault(kind="slow", host=host, after_s=at_s, seconds=lasts_s, speed=speed)
        return Fault(kind="pause" if kind == "freeze" else "cut", host=host, after_s=at_s, seconds=lasts_s)
