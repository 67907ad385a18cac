"""Who talks to whom in which round: pure functions of rank, round and a seed; no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from thinwire.errors import check, check_one_of

Topology = Literal["dissemination", "hypercube"]


class Peers(NamedTuple):
    """Whom a worker sends to in a round, and whom it receives from."""

    to: int
    source: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One peer per worker and round, in cycles of ceil(log2 P) rounds; every round is a permutation.

    Hop h of a cycle sends 2^h places on: round the ring (dissemination, any number of workers) or along
    dimension h (hypercube, a power of two, where both peers are the same worker). So what one worker
    knows reaches all others within a cycle. With a seed the workers change places after every cycle, in a
    random order that is the same on all of them, so that in time everyone meets everyone.

    >>> Schedule("dissemination", 5, None).peers(rank=0, round=1)
    Peers(to=2, source=3)
    >>> Schedule("hypercube", 8, None).peers(rank=5, round=1)
    Peers(to=7, source=7)
    """

    topology: Topology
    world_size: int
    seed: int | None
    """Seed of the random orders; None: workers never change places."""

    def __post_init__(self) -> None:
        check_one_of("topology", self.topology, get_args(Topology))
        check(self.world_size >= 1, "world_size", "at least 1", self.world_size)
        check(
            self.topology != "hypercube" or self.world_size.bit_count() == 1,
            "topology",
            f"'dissemination' with {self.world_size} workers, since a hypercube needs a power of two",
            self.topology,
        )

    @property
    def cycle(self) -> int:
        """Rounds until everyone may have heard of everyone: ceil(log2 P), at least 1."""
        return max(1, (self.world_size - 1).bit_length())

    def peers(self, rank: int, round: int) -> Peers:
        """Peers of worker `rank` in round `round`; the worker itself in a world of one."""
        turn, hop = divmod(round, self.cycle)
        workers, places = _order(self.world_size, self.seed, turn)
        place, step = places[rank], 1 << hop
        if self.world_size == 1:
            return Peers(rank, rank)
        if self.topology == "hypercube":
            return Peers(workers[place ^ step], workers[place ^ step])
        return Peers(workers[(place + step) % self.world_size], workers[(place - step) % self.world_size])


@lru_cache(maxsize=16)
def _order(world_size: int, seed: int | None, turn: int) -> tuple[list[int], list[int]]:
    """The worker at each place, and the place of each worker; the first cycle keeps the order of ranks."""
    workers = list(range(world_size))
    if seed is not None and turn > 0:
        random.Random(f"{seed} {turn}").shuffle(workers)
    places = [0] * world_size
    for place, worker in enumerate(workers):
        places[worker] = place
    return workers, places
