"""Drivers hold three very different algorithms: merges between rounds, a late return, a server.

Each is written once and run by both drivers: inline (all workers in one thread) and beside a
training thread (one thread per worker), with the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inline import Inline
from tests.worlds import run_threads
from thinwire.engine.driver import Driver, ProgressThread, Task, TrainingQueue
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import UsageError
from thinwire.wire.base import Lane
from thinwire.wire.local import LocalWorld
from thinwire.wire.wire import Meter, Wire
from thinwire.wire.work import Work, any_of, in_background, training_thread


def vectors(world_size: int) -> list[Tensor]:
    return [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(world_size)]


async def g_top_k(grad: Tensor, k: int, wire: Wire) -> None:
    """Recursive doubling: exchange k pairs, merge, keep the k largest, and again."""
    await in_background()  # selecting is work: not in the thread that runs backward
    index = grad.abs().topk(k).indices
    pairs, hop = torch.stack([index.double(), grad[index].double()]), 1
    while hop < wire.world_size:
        peer, inbox = wire.rank ^ hop, torch.empty_like(pairs)
        await wire.exchange(send=pairs, to=peer, recv=inbox, source=peer, tag=hop)
        low, high = (pairs, inbox) if wire.rank < peer else (inbox, pairs)
        total = torch.zeros(grad.numel(), dtype=torch.float64)
        total.index_add_(0, low[0].long(), low[1]).index_add_(0, high[0].long(), high[1])
        kept = total.abs().topk(k).indices.sort().values
        pairs, hop = torch.stack([kept.double(), total[kept]]), hop * 2
    grad.zero_()[pairs[0].long()] = (pairs[1] / wire.world_size).to(grad.dtype)


async def gossip(params: Tensor, step: int, wire: Wire) -> None:
    """Copy in the training thread, exchange beside training, fold in before the next step."""
    hop = 2 ** (step % (wire.world_size - 1).bit_length())
    sent, inbox = params.clone(), torch.empty_like(params)
    await in_background()
    to, source = (wire.rank + hop) % wire.world_size, (wire.rank - hop) % wire.world_size
    await wire.exchange(send=sent, to=to, recv=inbox, source=source, tag=step)
    await training_thread()
    params.add_(inbox - sent, alpha=0.5)


async def elastic_server(centre: Tensor, pushes: int, wire: Wire) -> None:
    """EASGD's owner of the centre: answers whoever comes, in order of arrival."""
    others = [rank for rank in range(wire.world_size) if rank != wire.rank]
    boxes = {rank: torch.empty_like(centre) for rank in others}
    works = [wire.exchange(recv=boxes[rank], source=rank, tag=2) for rank in others]
    for _ in range(pushes):
        first = await any_of(works)
        rank = others[first]
        await wire.exchange(send=centre.clone(), to=rank, tag=3)
        centre.add_(boxes[rank])
        works[first] = wire.exchange(recv=boxes[rank], source=rank, tag=2)


async def elastic_push(difference: Tensor, centre: Tensor, wire: Wire) -> None:
    await in_background(slack=math.inf)
    wire.exchange(send=difference, to=0, tag=2)
    await wire.exchange(recv=centre, source=0, tag=3)
    await training_thread()


def wire_of(lane: Lane) -> Wire:
    """A wire for exchanges, which have no order."""
    return Endpoint(lane, Meter()).wire()


def run_beside_training(coroutine: Coroutine[Any, Any, object]) -> None:
    """What a training loop does around one coroutine: start, wait, bring back, wait."""
    progress, training = ProgressThread("progress"), TrainingQueue()
    driver = Driver(progress.soon, training.soon)
    try:
        task = driver.start(coroutine, in_training=True)
        assert training.run_until(task.left, 10)
        if not task.done():
            assert training.run_until(task.returning, 10)
            driver.bring_back(task)
        assert training.run_until(task, 10)
        task.wait()
    finally:
        progress.stop()


Algorithm = Callable[[Tensor, Wire], Coroutine[Any, Any, object]]


def both_drivers(world_size: int, algorithm: Algorithm) -> list[Tensor]:
    """The vectors after the algorithm: the same bits from both drivers."""
    inline, world = vectors(world_size), LocalWorld(world_size)
    Inline().run(*(algorithm(inline[r], wire_of(world.lane(r))) for r in range(world_size)))
    beside = vectors(world_size)
    run_threads(world_size, lambda lane: run_beside_training(algorithm(beside[lane.rank], wire_of(lane))))
    for a, b in zip(inline, beside, strict=True):
        assert torch.equal(a, b)
    return inline


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_rounds_with_merging_in_between(world_size: int) -> None:
    results = both_drivers(world_size, lambda data, wire: g_top_k(data, 10, wire))
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].count_nonzero() == 10


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_coming_back_later_keeps_the_mean(world_size: int) -> None:
    results = both_drivers(world_size, lambda data, wire: gossip(data, 0, wire))
    before, after = torch.stack(vectors(world_size)), torch.stack(results)
    torch.testing.assert_close(before.mean(0), after.mean(0))
    assert after.var(0).mean() < before.var(0).mean()


def test_a_server_answers_whoever_comes() -> None:
    world, centre, pushes = LocalWorld(4), torch.zeros(1, dtype=torch.float64), 5

    async def client(wire: Wire) -> None:
        for n in range(pushes):
            out = torch.empty(1, dtype=torch.float64)
            await elastic_push(torch.tensor([wire.rank + n / 10], dtype=torch.float64), out, wire)

    clients = [client(wire_of(world.lane(rank))) for rank in (1, 2, 3)]
    Inline().run(elastic_server(centre, pushes * 3, wire_of(world.lane(0))), *clients)
    assert centre.item() == pytest.approx(sum(r + n / 10 for r in (1, 2, 3) for n in range(pushes)))


def test_a_server_beside_training() -> None:
    def worker(lane: Lane) -> float:
        centre, wire = torch.zeros(1, dtype=torch.float64), wire_of(lane)
        if wire.rank == 0:
            run_beside_training(elastic_server(centre, 15, wire))
            return centre.item()
        for n in range(5):
            push = torch.tensor([wire.rank + n / 10], dtype=torch.float64)
            run_beside_training(elastic_push(push, torch.empty(1, dtype=torch.float64), wire))
        return 0.0

    results = run_threads(4, worker)
    assert results[0] == pytest.approx(sum(r + n / 10 for r in (1, 2, 3) for n in range(5)))


def test_runs_in_the_calling_thread_until_it_waits() -> None:
    seen, inline, gate = [], Inline(), Work()

    async def coroutine() -> None:
        seen.append("called")
        await gate
        seen.append("went on")

    task = inline.driver.start(coroutine())
    assert seen == ["called"]
    gate.finish()
    assert not task.done()
    inline.settle()
    assert seen == ["called", "went on"]
    assert task.done()


def test_an_error_reaches_whoever_waits() -> None:
    inline, gate = Inline(), Work()

    async def coroutine() -> None:
        await gate

    task = inline.driver.start(coroutine(), in_training=True)
    gate.fail(ValueError("broken"))
    inline.settle()
    for stage in (task, task.left, task.returning):
        with pytest.raises(ValueError, match="broken"):
            stage.wait()


def test_a_deadlock_is_named() -> None:
    world = LocalWorld(2)

    async def waits_in_vain() -> None:
        await world.lane(0).exchange(recv=torch.empty(1), source=1)

    with pytest.raises(UsageError, match=r"deadlock: coroutine 0 waits for the wire"):
        Inline().run(waits_in_vain())


def test_awaiting_something_strange_is_refused() -> None:
    class Strange:
        def __await__(self) -> Any:
            yield "something"

    async def coroutine() -> None:
        await Strange()

    task: Task = Inline().driver.start(coroutine())
    with pytest.raises(UsageError, match="no driver knows"):
        task.wait()


@pytest.mark.parametrize("in_training", [True, False])
def test_where_a_coroutine_goes_on(in_training: bool) -> None:
    """In the thread it was started for, in the background after leaving, in training when it asks."""
    progress, training = ProgressThread("progress"), TrainingQueue()
    driver, gates, seen = Driver(progress.soon, training.soon), [Work(), Work()], list[str]()
    own = threading.current_thread().name

    def note() -> None:
        seen.append(threading.current_thread().name)

    async def coroutine() -> None:
        await gates[0]
        note()
        await in_background(due=3, slack=2)
        note()
        await gates[1]
        note()
        seen.append(str(await training_thread()))
        note()
        await later
        note()

    later = Work()
    try:
        task = driver.start(coroutine(), in_training=in_training)
        gates[0].finish()
        training.run_until(task.left, 10)
        promise = task.promise
        gates[1].finish()
        if in_training:
            assert promise is not None
            assert (promise.due, promise.slack) == (3, 2)
            assert training.run_until(task.returning, 10)
            driver.bring_back(task, 1.5)
        else:
            assert promise is None, "only what training has started keeps it waiting"
            while task.waits_for != "for the wire" or not task.in_training:
                training.run_until(later, 0.01)
        later.finish()
        assert training.run_until(task, 10)
        task.wait()
    finally:
        progress.stop()
    first = own if in_training else "progress"
    assert seen == [first, "progress", "progress", "1.5" if in_training else "0.0", own, own]


def test_coming_back_without_having_left_goes_on_at_once() -> None:
    seen = []

    async def coroutine() -> None:
        seen.append(await training_thread())

    assert Inline().driver.start(coroutine(), in_training=True).done()
    assert seen == [0.0]


def test_a_queue_gives_up_after_a_while_and_runs_what_came() -> None:
    training, calls, work = TrainingQueue(), [], Work()
    training.soon(lambda: calls.append(1))
    assert not training.run_until(work, 0.01)
    training.soon(work.finish)
    assert training.run_until(work, 10)
    training.soon(lambda: calls.append(2))
    training.run()
    assert calls == [1, 2]
