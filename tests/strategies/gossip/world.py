"""Gossip among many workers in one thread: messages arrive when the test says, in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.inline import Inline
from tests.strategies.inline import make_core, waiting
from thinwire.strategies.base import Strategy
from thinwire.strategies.stochastic_gradient_push import PushState
from thinwire.traffic import Round
from thinwire.wire.local import LocalWorld
from thinwire.wire.work import Work, after

SIZES = (150, 301, 49)
Call = Callable[[], None]


class HeldMedium:
    """Keeps the ends of transfers until the test wants them."""

    def __init__(self) -> None:
        self.held: list[Call] = []
        self.sent: list[tuple[int, int, int]] = []
        """Source, destination and bytes of every transfer."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> Work:
        return after(seconds)

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        self.sent.append((source, to, num_bytes))
        self.held += [sent, arrived]

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        self.held.append(ended)


class GossipWorld:
    """Workers under one strategy, each with buckets of random numbers, which only `update` trains."""

    def __init__(self, strategy: Strategy, world_size: int, seed: int = 0, *, alike: bool = True) -> None:
        self.random = random.Random(seed)
        self.world_size = world_size
        self.medium = HeldMedium()
        self.inline = Inline()
        self.generator = torch.Generator().manual_seed(seed)
        start = [[self._noise(size)] for size in SIZES]
        world = LocalWorld(world_size, self.medium)
        self.cores = [make_core(strategy, world.lane(rank), self.inline, start) for rank in range(world_size)]
        self.states: list[Any] = [core.groups[0].state for core in self.cores]
        self.expected = self.weighted_sum()
        """Of all workers' parameters, by their masses; what gossip must not change."""
        if not alike:
            for rank in range(world_size):
                self.update(rank)

    def _noise(self, numel: int) -> Tensor:
        return torch.randn(numel, generator=self.generator, dtype=torch.float64)

    # -- what workers do ----------------------------------------------------------------------------

    def update(self, rank: int) -> None:
        """An optimizer step of one worker; its change of the sum is expected from then on."""
        before = self.weighted(rank)
        for bucket in self.cores[rank].buckets:
            bucket.add_(self._noise(bucket.num_parameters), scale=0.1)
        self.expected = self.expected + self.weighted(rank) - before

    def launch(self, rank: int) -> None:
        """Start mixing, as after an optimizer step."""
        task = waiting(self.inline, self.cores[rank], self.cores[rank].after_step())
        self.inline.settle()
        task.wait(0)

    def carry(self, share: float = 1.0) -> None:
        """Let some of the transfers under way end, in any order."""
        held = self.medium.held
        self.random.shuffle(held)
        keep = round((1 - share) * len(held))
        ended, held[:] = held[keep:], held[:keep]
        for call in ended:
            call()
        self.inline.settle()

    def has_arrived(self, rank: int) -> bool:
        """Whether a worker can go on with its next step without waiting."""
        return all(pending.task.returning.done() for pending in self.cores[rank].mixer._pending)

    def land(self, rank: int) -> None:
        """Bring mixing back, as before an optimizer step."""
        task = waiting(self.inline, self.cores[rank], self.cores[rank].before_step())
        self.inline.settle()
        assert task.wait(0), "not everything has arrived"

    def round(self) -> None:
        """Everyone launches, everything arrives, everyone lands."""
        order = list(range(self.world_size))
        self.random.shuffle(order)
        for rank in order:
            self.launch(rank)
        while self.medium.held:
            self.carry()
        for rank in order:
            self.land(rank)

    def synchronize(self) -> None:
        """As a link does, on all workers."""
        tasks = [waiting(self.inline, core, core.synchronizing()) for core in self.cores]
        self.inline.settle()
        while self.medium.held:
            self.carry()
        for task in tasks:
            assert task.wait(0), "deadlock"

    # -- what must not change ------------------------------------------------------------------------

    def flat(self, rank: int) -> Tensor:
        """A worker's parameters."""
        return torch.cat([bucket.read() for bucket in self.cores[rank].buckets])

    def masses(self, rank: int) -> Tensor:
        """How much each of a worker's parameters counts."""
        state = self.states[rank]
        if not isinstance(state, PushState):
            return torch.ones(sum(SIZES), dtype=torch.float64)
        return torch.cat([by_number(state, index, masses) for index, masses in enumerate(state.masses)])

    def weighted(self, rank: int) -> Tensor:
        return self.flat(rank) * self.masses(rank)

    def weighted_sum(self) -> Tensor:
        return torch.stack([self.weighted(rank) for rank in range(self.world_size)]).sum(0)

    def mass_sum(self) -> Tensor:
        return torch.stack([self.masses(rank) for rank in range(self.world_size)]).sum(0)

    def close(self) -> None:
        """Close the coroutines that would go on for ever."""
        for core in self.cores:
            core.abandon()


def by_number(state: PushState, bucket: int, masses: Sequence[float]) -> Tensor:
    """Masses of a bucket's chunks, for each of its numbers."""
    chunks = state.channels[bucket].chunks.chunks
    lengths = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
    return torch.tensor(masses, dtype=torch.float64).repeat_interleave(lengths)
