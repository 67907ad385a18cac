"""Gossip among many workers in one thread: messages arrive when the test says, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.driver import Inline, Task
from thinwire.strategies.base import Parameters
from thinwire.strategies.gossip.cells import Place
from thinwire.strategies.gossip.letter import Layout
from thinwire.strategies.gossip.mail import _PAYLOADS
from thinwire.strategies.gossip_grad import GossipGraD
from thinwire.wire.base import Work
from thinwire.wire.threads import ThreadWire, ThreadWorld

SIZES = (150, 301, 49)


class Flat:
    """A bucket without a model."""

    def __init__(self, index: int, data: Tensor) -> None:
        self.index = index
        self.data = data
        self.num_parameters = data.numel()
        self.companions: Mapping[str, Parameters] = {}

    def read(self, out: Tensor | None = None) -> Tensor:
        return self.data.clone() if out is None else out.copy_(self.data)

    def write_(self, data: Tensor) -> None:
        self.data.copy_(data)

    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        self.data.add_(data, alpha=scale)

    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        self.data.lerp_(data, weight)


class Spy:
    """A wire that remembers what was sent."""

    def __init__(self, wire: ThreadWire) -> None:
        self.inner = wire
        self.rank, self.world_size = wire.rank, wire.world_size
        self.sent: list[tuple[int, int, Tensor]] = []
        """To whom, with which tag, and what."""

    def exchange(self, **what: Any) -> Work:
        if what.get("send") is not None:
            self.sent.append((what["to"], what.get("tag", 0), what["send"].clone()))
        return self.inner.exchange(**what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Village:
    """Workers under one strategy, each with buckets of random numbers; nothing trains them."""

    def __init__(self, strategy: GossipGraD, world_size: int, seed: int = 0, *, alike: bool = True) -> None:
        self.random = random.Random(seed)
        self.bags: list[Callable[[], None]] = []
        self.world = ThreadWorld(world_size, carry=self.bags.append)
        self.strategy = strategy
        self.inline = Inline()
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
        self.buckets = [[Flat(i, data.clone()) for i, data in enumerate(start)] for _ in range(world_size)]
        self.wires: list[Any] = [Spy(self.world.wire(rank)) for rank in range(world_size)]
        self.states = [
            strategy.init(buckets, wire)  # type: ignore[arg-type]  # parameters only
            for buckets, wire in zip(self.buckets, self.wires, strict=True)
        ]
        self.flights: list[list[Task]] = [[] for _ in range(world_size)]
        if "serve" in strategy.seams:
            for rank, state in enumerate(self.states):
                self.inline.driver.start(strategy.serve(state, self.wires[rank]), f"serve {rank}")
        self.generator = generator
        self.expected = self.total()
        if not alike:
            for rank in range(world_size):
                self.update(rank)

    # -- what workers do ----------------------------------------------------------------------------

    def update(self, rank: int) -> None:
        """A step of its own; what it adds to the sum is expected from then on."""
        before = self.mass_of(rank)
        for bucket in self.buckets[rank]:
            noise = torch.randn(bucket.num_parameters, generator=self.generator, dtype=torch.float64)
            bucket.data += 0.1 * noise
        self.expected = self.expected + self.mass_of(rank) - before

    def launch(self, rank: int) -> None:
        for bucket in self.buckets[rank]:
            coroutine = self.strategy.mix(bucket, self.states[rank], self.wires[rank])
            self.flights[rank].append(self.inline.driver.start(coroutine, f"mix of {rank}"))
        self.inline.settle()

    def carry(self, share: float = 1.0) -> None:
        """Let some of the messages under way arrive, in any order."""
        self.random.shuffle(self.bags)
        keep = round((1 - share) * len(self.bags))
        bags, self.bags[:] = self.bags[keep:], self.bags[:keep]
        for bag in bags:
            bag()
        self.inline.settle()

    def has_arrived(self, rank: int) -> bool:
        """All that the worker has launched."""
        return all(task.landing.done() for task in self.flights[rank])

    def land(self, rank: int) -> None:
        for task in self.flights[rank]:
            self.inline.driver.touch_down(task)
            task.wait(0)
        self.flights[rank].clear()

    def round(self) -> None:
        """Everyone launches, everything arrives, everyone lands."""
        order = list(range(self.world.world_size))
        self.random.shuffle(order)
        for rank in order:
            self.launch(rank)
        while self.bags:
            self.carry()
        for rank in order:
            self.land(rank)

    def settle(self) -> None:
        tasks = [
            self.inline.driver.start(self.strategy.settle(b, s, w), "settle")
            for b, s, w in zip(self.buckets, self.states, self.wires, strict=True)
        ]
        self.inline.settle()
        while self.bags:
            self.carry()
        for task in tasks:
            self.inline.driver.touch_down(task)
            task.wait(0)

    # -- what must not change ------------------------------------------------------------------------

    def flat(self, rank: int) -> Tensor:
        return torch.cat([bucket.data for bucket in self.buckets[rank]])

    def mass_of(self, rank: int) -> Tensor:
        """The worker's values, weighted."""
        state = self.states[rank]
        return self.flat(rank) * self._by_element(state.masses or [1.0] * len(state.fixed.cells))

    def total(self) -> Tensor:
        """Of all workers."""
        return torch.stack([self.mass_of(rank) for rank in range(self.world.world_size)]).sum(0)

    def _by_element(self, masses: list[float]) -> Tensor:
        cells = self.states[0].fixed.cells.cells
        lengths = torch.tensor([cell.stop - cell.start for cell in cells])
        return torch.tensor(masses, dtype=torch.float64).repeat_interleave(lengths)

    def under_way(self) -> tuple[Tensor, Tensor]:
        """Values and masses of all messages of push-sum that were sent and not folded in."""
        values, masses = torch.zeros(sum(SIZES), dtype=torch.float64), torch.zeros(sum(SIZES))
        for rank, wire in enumerate(self.wires):
            for to, head, parts in self._messages(wire):
                mail = self.states[to].fixed.mail
                assert mail is not None
                folded = mail.received[rank] - sum(a.source == rank for a in mail.arrived)
                number = self._seen.get((rank, to), 0)
                self._seen[rank, to] = number + 1
                if number < folded:
                    continue
                mass = self._by_element(head[5:])
                values += mass * self._decode(head, parts)
                masses = masses + mass
        return values, masses

    def _messages(self, wire: Spy) -> list[tuple[int, list[float], dict[int, Tensor]]]:
        self._seen: dict[tuple[int, int], int] = {}
        messages: list[tuple[int, list[float], dict[int, Tensor]]] = []
        for to, tag, data in wire.sent:
            if tag == len(SIZES):
                messages.append((to, data.tolist(), {}))
            else:
                messages[-1][2][tag] = data
        return messages

    def _decode(self, head: list[float], parts: dict[int, Tensor]) -> Tensor:
        state = self.states[0]
        window = state.fixed.cells.window(Place(int(head[2])), int(head[3]))
        flats = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for bucket, spans in window.spans.items():
            layout = Layout(spans, 8, _PAYLOADS[int(head[4])], 0)
            likes = [flats[bucket][p.start : p.stop] for p in layout.parts]
            read = layout.read(bucket, parts[bucket], likes, state.memory)
            flats[bucket] = layout.spread(read, 0, SIZES[bucket])
        return torch.cat(flats)
