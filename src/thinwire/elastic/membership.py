"""Who trains together: memberships as values, and the rules that decide who stays when workers are lost.

Nothing here knows of sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import DataError


@dataclass(frozen=True, slots=True)
class Member:
    """One process. One that was left out and comes back is a new member."""

    id: str
    host: str
    """By which the others reach it."""
    port: int
    """The port that it listens on."""

    def to_json(self) -> list[Any]:
        return [self.id, self.host, self.port]

    @classmethod
    def from_json(cls, value: object) -> Member:
        match value:
            case [str(id_), str(host), int(port)] if id_ and len(id_) <= 64 and 0 < port < 1 << 16:
                return cls(id_, host, port)
        raise DataError(f"{str(value)[:200]!r} is no member")


@dataclass(frozen=True, slots=True)
class Membership:
    """Who trains together from one change of the world to the next; rank is the place in `members`."""

    generation: int
    members: tuple[Member, ...]
    lineage: str
    """Names the run; a minority that goes on by itself gives itself another one, and never merges."""

    @property
    def ids(self) -> list[str]:
        return [member.id for member in self.members]

    def to_json(self) -> list[Any]:
        return [self.generation, [member.to_json() for member in self.members], self.lineage]

    @classmethod
    def from_json(cls, value: object) -> Membership:
        match value:
            case [int(generation), [*members], str(lineage)] if generation > 0 and len(lineage) <= 64:
                found = tuple(map(Member.from_json, members))
                if 0 < len({member.id for member in found}) == len(found):
                    return cls(generation, found, lineage)
        raise DataError(f"{str(value)[:200]!r} is no membership")


def is_quorum(votes: Collection[str], ids: Sequence[str], dead: Collection[str]) -> bool:
    """Whether these workers may decide for all: more than half of those not known to be dead, or half of them
    with the first one.

    Two groups that cannot reach each other are never both a quorum. Who is known to be dead (its process has
    ended) takes part in no other group, so any number of deaths leaves the rest a quorum.
    """
    living = [each for each in ids if each not in dead]
    count = sum(each in votes for each in living)
    return 2 * count > len(living) or (2 * count == len(living) > 0 and living[0] in votes)


def largest_connected(ids: Sequence[str], unreachable: Mapping[str, Collection[str]]) -> list[str]:
    """Those who can all reach each other, in the order of `ids`.

    While two cannot, the one that misses the most others goes; among equals, the last one.
    """
    left = list(ids)
    while True:
        misses = {
            each: sum(
                other in unreachable.get(each, ()) or each in unreachable.get(other, ())
                for other in left
                if other != each
            )
            for each in left
        }
        worst = max(reversed(left), key=misses.__getitem__, default="")
        if not worst or not misses[worst]:
            return left
        left.remove(worst)
