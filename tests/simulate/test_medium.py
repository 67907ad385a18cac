"""Lanes on the virtual clock: the bits of the thread world, at the times of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_driver import elastic_server, g_top_k, gossip, vectors, wire_of
from tests.inline import Inline
from tests.wire.operations import every_operation, some_groups, some_lanes, total, wire_over
from thinwire.engine.driver import Driver, Task
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import PeerDiffers, PeerLost
from thinwire.hosts.description import describe
from thinwire.simulate.clock import Clock, virtual_world
from thinwire.simulate.network import Network
from thinwire.wire.base import Lane
from thinwire.wire.local import LocalLane, LocalWorld
from thinwire.wire.wire import Meter, Wire


class Virtual:
    """A world on a clock of its own."""

    def __init__(
        self, world_size: int, *, rate: str = "80mbit", latency_s: float = 0.001, sites: str | None = None
    ) -> None:
        description = describe(hosts=world_size, rate=rate, sites=sites, uplink=sites and rate)
        self.clock = Clock()
        self.world = virtual_world(self.clock, Network(description, latency_s=latency_s), range(world_size))
        self.lanes: list[LocalLane] = [self.world.lane(rank) for rank in range(world_size)]

    def play(self, *coroutines: Coroutine[Any, Any, object]) -> list[float]:
        """Run coroutines on the clock; when each ended."""
        driver = Driver(self.clock.soon, self.clock.soon)
        return self.run([driver.start(coroutine) for coroutine in coroutines])

    def play_wires(self, algorithm: Callable[[Wire], Coroutine[Any, Any, None]]) -> list[float]:
        """The same with a coroutine on every worker, which is given its wire."""
        driver = Driver(self.clock.soon, self.clock.soon)
        return self.run([Endpoint(lane, Meter()).start(driver, "reduce", algorithm) for lane in self.lanes])

    def run(self, tasks: list[Task]) -> list[float]:
        ended = dict[int, float]()

        def note(number: int) -> None:
            ended[number] = self.clock.now_s

        for number, task in enumerate(tasks):
            task.when_done(lambda number=number: note(number))  # type: ignore[misc]
        self.clock.run()
        for task in tasks:
            assert task.done(), f"deadlock: waits {task.waits_for}"
            task.wait()
        return [ended[number] for number in range(len(tasks))]


Algorithm = Callable[[Tensor, Wire], Coroutine[Any, Any, object]]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(lambda data, wire: g_top_k(data, 10, wire), id="g-top-k"),
        pytest.param(lambda data, wire: gossip(data, 0, wire), id="gossip"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_same_bits_as_in_the_thread_world(algorithm: Algorithm, world_size: int) -> None:
    inline, local = vectors(world_size), LocalWorld(world_size)
    Inline().run(*(algorithm(inline[r], wire_of(local.lane(r))) for r in range(world_size)))
    ours, virtual = vectors(world_size), Virtual(world_size)
    virtual.play(*(algorithm(data, wire_of(lane)) for data, lane in zip(ours, virtual.lanes, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(ours, inline, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operation(world_size: int) -> None:
    virtual = Virtual(world_size)
    virtual.play(*(every_operation(wire_over(lane)) for lane in virtual.lanes))
    virtual.play_wires(every_operation)


def test_lanes_and_groups() -> None:
    virtual = Virtual(3)
    virtual.play(*(some_lanes(lane) for lane in virtual.lanes))
    virtual.play_wires(some_groups)


def test_a_server_answers_whoever_comes() -> None:
    virtual, centre, pushes = Virtual(4), torch.zeros(1, dtype=torch.float64), 5

    async def client(wire: Lane) -> None:
        for n in range(pushes):
            await virtual.clock.sleep(0.1 * wire.rank)
            wire.exchange(send=torch.tensor([wire.rank + n / 10], dtype=torch.float64), to=0, tag=2)
            await wire.exchange(recv=torch.empty(1, dtype=torch.float64), source=0, tag=3)

    clients = [client(lane) for lane in virtual.lanes[1:]]
    ended_s = virtual.play(elastic_server(centre, pushes * 3, wire_of(virtual.lanes[0])), *clients)
    assert centre.item() == pytest.approx(sum(r + n / 10 for r in (1, 2, 3) for n in range(pushes)))
    assert ended_s[1] < ended_s[2] < ended_s[3]  # nobody waits for a slower one


def test_an_exchange_by_pairs_takes_one_way() -> None:
    virtual = Virtual(2, latency_s=0.25)

    async def worker(lane: Lane) -> None:
        data, inbox = torch.ones(2_500_000), torch.empty(2_500_000)
        await lane.exchange(send=data, to=1 - lane.rank, recv=inbox, source=1 - lane.rank)

    assert virtual.play(*map(worker, virtual.lanes)) == [1.25, 1.25]


def test_a_message_leaves_when_both_ends_have_asked() -> None:
    virtual = Virtual(2, latency_s=0.25)

    async def sender(lane: Lane) -> None:
        await lane.exchange(send=torch.ones(2_500_000), to=1)

    async def receiver(lane: Lane) -> None:
        await virtual.clock.sleep(3.0)
        await lane.exchange(recv=torch.empty(2_500_000), source=0)

    assert virtual.play(sender(virtual.lanes[0]), receiver(virtual.lanes[1])) == [4.0, 4.25]


def test_sizes_alone_take_the_same_time() -> None:
    def ended_s(device: str) -> list[float]:
        virtual = Virtual(4)

        async def worker(lane: Lane) -> None:
            await virtual.clock.sleep(0.1 * lane.rank)
            await total(lane, torch.ones(1000, device=device))

        return virtual.play(*map(worker, virtual.lanes))

    assert ended_s("meta") == ended_s("cpu")
    assert math.isclose(ended_s("cpu")[0], 0.3 + 6000 / 1e7 + 6 * 0.001)


def test_operations_that_do_not_match_are_refused_everywhere() -> None:
    virtual = Virtual(2)

    async def worker(lane: Lane) -> None:
        await total(lane, torch.ones(3 if lane.rank == 0 else 4))

    with pytest.raises(PeerDiffers, match=r"does .* where another does"):
        virtual.play(*map(worker, virtual.lanes))


def test_a_lost_world_fails_operations_under_way_and_later_ones() -> None:
    virtual = Virtual(2)
    lane, lost = virtual.lanes[0], PeerLost("worker 1 is gone", rank=1)
    waiting = [total(lane, torch.ones(1)), lane.exchange(recv=torch.ones(1), source=1)]
    virtual.world.lose(lost)
    for work in [*waiting, total(lane, torch.ones(1))]:
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            work.wait(1)


def test_messages_take_their_time_and_their_answers_too() -> None:
    virtual, centre = Virtual(3, latency_s=0.25), torch.zeros(2_500_000)
    endpoints = [Endpoint(lane, Meter()) for lane in virtual.lanes]
    driver = Driver(virtual.clock.soon, virtual.clock.soon)

    async def serve(wire: Wire) -> None:
        async for source, tag, theirs in wire.listen(centre):
            await wire.answer(centre + theirs[0], to=source, tag=tag)

    async def ask(wire: Wire) -> None:
        answer = await wire.ask(torch.full_like(centre, wire.rank), to=0)
        assert answer[0] == wire.rank

    serving = endpoints[0].start(driver, "serve", serve)
    asking = [endpoint.start(driver, "mix", ask) for endpoint in endpoints[1:]]
    first_s, last_s = sorted(virtual.run(asking))
    # header, message and answer; the other's header and message come after the first message
    assert first_s == pytest.approx(0.25 + 1.25 + 1.25, abs=0.01)
    assert last_s == pytest.approx(first_s + 1.25, abs=0.01)
    messengers = [endpoint.messenger for endpoint in endpoints]
    virtual.run([e.start(driver, "settle", m.quiesce) for e, m in zip(endpoints, messengers, strict=True)])
    assert serving.done()
    virtual.run(
        [e.start(driver, "settle", m.say_goodbye) for e, m in zip(endpoints, messengers, strict=True)]
    )
    assert not virtual.world.open


def test_workers_know_their_hosts_and_sites() -> None:
    wire = wire_of(Virtual(4, sites="2+2").lanes[0])
    assert wire.host_of(1) == "host 1"
    assert wire.hosts() == [[0], [1], [2], [3]]
    assert wire.sites() == [[0, 1], [2, 3]]
