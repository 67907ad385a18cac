"""The virtual wire: the bits of the thread world, at the times of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_driver import elastic_server, g_top_k, gossip, vectors
from tests.wire.operations import every_operation, some_lanes
from thinwire.engine.driver import Driver, Inline, Task
from thinwire.errors import PeerDiffers, PeerLost
from thinwire.hosts.description import describe
from thinwire.simulate.clock import Clock
from thinwire.simulate.network import Network
from thinwire.simulate.wire import VirtualWorld
from thinwire.wire.base import Wire
from thinwire.wire.threads import ThreadWorld


def virtual(world_size: int, *, rate: str = "80mbit", latency_s: float = 0.001) -> VirtualWorld:
    network = Network(describe(hosts=world_size, rate=rate), latency_s=latency_s)
    return VirtualWorld(Clock(), network, range(world_size))


def play(world: VirtualWorld, *coroutines: Coroutine[Any, Any, object]) -> list[float]:
    """Run coroutines on the clock, landing each as soon as it asks; when each ended."""
    driver, ended = Driver(world.clock.soon), dict[int, float]()

    def watch(number: int, task: Task) -> None:
        task.landing.when_done(lambda: world.clock.soon(lambda: driver.touch_down(task)))
        task.when_done(lambda: ended.setdefault(number, world.clock.now_s))

    tasks = [driver.start(coroutine) for coroutine in coroutines]
    for number, task in enumerate(tasks):
        watch(number, task)
    world.clock.run()
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
    inline, threads = vectors(world_size), ThreadWorld(world_size)
    Inline().run(*(algorithm(inline[r], threads.wire(r)) for r in range(world_size)))
    ours, world = vectors(world_size), virtual(world_size)
    play(world, *(algorithm(ours[r], world.wire(r)) for r in range(world_size)))
    assert all(torch.equal(a, b) for a, b in zip(ours, inline, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operation(world_size: int) -> None:
    world = virtual(world_size)
    play(world, *(every_operation(world.wire(rank)) for rank in range(world_size)))


def test_lanes() -> None:
    world = virtual(3)
    play(world, *(some_lanes(world.wire(rank)) for rank in range(3)))


def test_a_server_answers_whoever_comes() -> None:
    world, centre, pushes = virtual(4), torch.zeros(1, dtype=torch.float64), 5

    async def client(wire: Wire) -> None:
        for n in range(pushes):
            await world.clock.sleep(0.1 * wire.rank)
            wire.exchange(send=torch.tensor([wire.rank + n / 10], dtype=torch.float64), to=0, tag=2)
            await wire.exchange(recv=torch.empty(1, dtype=torch.float64), source=0, tag=3)

    clients = [client(world.wire(rank)) for rank in (1, 2, 3)]
    ended_s = play(world, elastic_server(centre, pushes * 3, world.wire(0)), *clients)
    assert centre.item() == pytest.approx(sum(r + n / 10 for r in (1, 2, 3) for n in range(pushes)))
    assert ended_s[1] < ended_s[2] < ended_s[3]  # nobody waits for a slower one


def test_an_exchange_by_pairs_takes_one_way() -> None:
    world = virtual(2, latency_s=0.25)

    async def worker(wire: Wire) -> None:
        data, inbox = torch.ones(2_500_000), torch.empty(2_500_000)
        await wire.exchange(send=data, to=1 - wire.rank, recv=inbox, source=1 - wire.rank)

    assert play(world, worker(world.wire(0)), worker(world.wire(1))) == [1.25, 1.25]


def test_a_message_leaves_when_both_ends_have_asked() -> None:
    world = virtual(2, latency_s=0.25)

    async def sender(wire: Wire) -> None:
        await wire.exchange(send=torch.ones(2_500_000), to=1)

    async def receiver(wire: Wire) -> None:
        await world.clock.sleep(3.0)
        await wire.exchange(recv=torch.empty(2_500_000), source=0)

    assert play(world, sender(world.wire(0)), receiver(world.wire(1))) == [4.0, 4.25]


def test_sizes_alone_take_the_same_time() -> None:
    def ended_s(device: str) -> list[float]:
        world = virtual(4)

        async def worker(wire: Wire) -> None:
            await world.clock.sleep(0.1 * wire.rank)
            await wire.all_reduce_(torch.ones(1000, device=device))

        return play(world, *(worker(world.wire(rank)) for rank in range(4)))

    assert ended_s("meta") == ended_s("cpu")
    assert math.isclose(ended_s("cpu")[0], 0.3 + 6000 / 1e7 + 6 * 0.001)


def test_operations_that_do_not_match_are_refused_everywhere() -> None:
    world = virtual(2)

    async def worker(wire: Wire) -> None:
        await wire.all_reduce_(torch.ones(3 if wire.rank == 0 else 4))

    with pytest.raises(PeerDiffers, match="same operations in the same order"):
        play(world, worker(world.wire(0)), worker(world.wire(1)))


def test_a_lost_world_fails_what_is_under_way_and_what_comes_after() -> None:
    world = virtual(2)
    wire, lost = world.wire(0), PeerLost("worker 1 is gone", rank=1)
    waiting = [wire.all_reduce_(torch.ones(1)), wire.exchange(recv=torch.ones(1), source=1)]
    world.lose(lost)
    for work in [*waiting, wire.all_reduce_(torch.ones(1))]:
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            work.wait(1)
