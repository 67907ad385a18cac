"""Messages to whoever listens, between threads: none is lost, and everything open ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inline import Inline
from tests.worlds import run_threads
from thinwire.engine.driver import Driver, ProgressThread, Task, TrainingQueue
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import PeerLost
from thinwire.traffic import Traffic
from thinwire.wire.local import LocalLane, LocalWorld
from thinwire.wire.messages import Received
from thinwire.wire.wire import Meter, Wire

Make = Callable[[Wire], Coroutine[Any, Any, None]]
LIKE = torch.empty(0, dtype=torch.float64)


class Worker:
    """Coroutines of one worker: in a thread beside the training thread, and pauses in the latter."""

    def __init__(self, lane: LocalLane) -> None:
        self.endpoint, self.meter = Endpoint(lane, meter := Meter()), meter
        self._progress, self._training = ProgressThread("progress"), TrainingQueue()
        self._driver = Driver(self._progress.soon, self._training.soon)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def serve(self, make: Make) -> Task:
        self.endpoint.messenger.resume()
        return self.endpoint.start(self._driver, "serve", make)

    def do(self, make: Make) -> None:
        assert self.endpoint.start(self._driver, "mix", make).wait(500)

    def pause(self, serving: Task) -> None:
        self._run(self.endpoint.messenger.quiesce)
        assert serving.wait(500)

    def leave(self) -> None:
        self._run(self.endpoint.messenger.say_goodbye)

    def _run(self, make: Make) -> None:
        task = self.endpoint.start(self._driver, "settle", make, in_training=True)
        assert self._training.run_until(task, 20), f"waits {task.waits_for}"
        task.wait()


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_pause_waits_for_messages_that_handlers_send_on(world_size: int) -> None:
    """A message with n hops left is passed on by every handler, slowly; so n + 1 are handled for each."""
    hops = 7

    def worker(lane: LocalLane) -> int:
        handled = 0

        async def serve(wire: Wire) -> None:
            nonlocal handled
            async for _, _, data in wire.listen(LIKE):
                time.sleep(0.001 * wire.rank)
                if data[0] > 0:
                    wire.send(data - 1, to=(wire.rank + 1) % wire.world_size)
                handled += 1

        async def begin(wire: Wire) -> None:
            if wire.rank == 0:
                await wire.send(numbers(hops), to=wire.world_size - 1)

        with Worker(lane) as me:
            for round_ in (1, 2):  # a listener goes on after a pause
                serving = me.serve(serve)
                me.do(begin)
                me.pause(serving)
                total = numbers(handled)
                me.endpoint.issue(lambda wire, total=total: wire.all_reduce_(total)).wait(500)  # type: ignore[misc]
                assert total.item() == round_ * (hops + 1)
            me.leave()
        return handled

    assert sum(run_threads(world_size, worker)) == 2 * (hops + 1)


def test_messages_have_any_length_and_come_in_the_order_of_each_sender() -> None:
    def worker(lane: LocalLane) -> list[Received]:
        came: list[Received] = []

        async def serve(wire: Wire) -> None:
            if wire.rank == 0:
                came.extend([message async for message in wire.listen(LIKE)])

        async def send(wire: Wire) -> None:
            for number in range(20):
                wire.send(torch.full((number,), float(wire.rank), dtype=torch.float64), to=0, tag=number)

        with Worker(lane) as me:
            serving = me.serve(serve)
            me.do(send)
            counted = me.meter.traffic
            me.pause(serving)
            traffic.append(me.meter.traffic)
            me.leave()
        assert counted.sent_bytes == (8 * sum(range(20)) + 20 * 24 if lane.rank else 0)
        return came

    traffic: list[Traffic] = []
    came = run_threads(3, worker)[0]
    assert len(came) == 3 * 20
    assert sum(each.sent_bytes for each in traffic) == sum(each.received_bytes for each in traffic)
    for rank in range(3):
        mine = [message for message in came if message.source == rank]
        assert [message.tag for message in mine] == list(range(20))
        assert all(message.data.tolist() == [rank] * message.tag for message in mine)


def test_answers_come_in_the_order_of_questions_also_to_oneself() -> None:
    """Rank 0 numbers the questions of each worker by tag; every worker asks itself or rank 0 many at once."""

    def worker(lane: LocalLane) -> dict[int, list[float]]:
        answers: dict[int, list[float]] = {}

        async def serve(wire: Wire) -> None:
            if wire.rank == 0:
                asked: dict[tuple[int, int], int] = {}
                async for source, tag, data in wire.listen(LIKE):
                    number = asked[source, tag] = asked.get((source, tag), 0) + 1
                    await wire.answer(data + number, to=source, tag=tag)

        def ask(tag: int) -> Make:
            async def asking(wire: Wire) -> None:
                for _ in range(10):
                    answer = await wire.ask(numbers(100 * wire.rank + 1000 * tag), to=0, tag=tag)
                    answers.setdefault(tag, []).append(answer.item())

            return asking

        async def ask_at_once(wire: Wire) -> None:
            asked = [me.endpoint.messenger.expect_answer(LIKE.new_zeros(1), 0, 5) for _ in range(10)]
            for _ in asked:
                wire.send(numbers(100 * wire.rank), to=0, tag=5)
            for answer in asked:
                await answer.work
                answers.setdefault(5, []).append(answer.data.item())

        with Worker(lane) as me:
            serving = me.serve(serve)
            tasks = [threading.Thread(target=me.do, args=(ask(tag),)) for tag in range(3)]
            for task in tasks:
                task.start()
            for task in tasks:
                task.join(20)
            me.do(ask_at_once)
            me.pause(serving)
            me.leave()
        return answers

    for rank, answers in enumerate(run_threads(3, worker)):
        for tag in range(3):
            assert answers[tag] == [100 * rank + 1000 * tag + n for n in range(1, 11)]
        assert answers[5] == [100 * rank + n for n in range(1, 11)]


def test_a_message_to_oneself_is_a_copy_and_is_delivered_without_the_lane() -> None:
    came: list[Received] = []

    async def serve(wire: Wire) -> None:
        came.extend([message async for message in wire.listen(LIKE)])

    with Worker(LocalWorld(1).lane(0)) as me:
        serving, data = me.serve(serve), numbers(1, 2)

        async def send(wire: Wire) -> None:
            assert wire.send(data, to=0, tag=4).done()
            data.zero_()

        me.do(send)
        me.pause(serving)
        me.leave()
        assert me.meter.traffic.sent_bytes == 0
    assert [(source, tag, data.tolist()) for source, tag, data in came] == [(0, 4, [1, 2])]


def test_a_lost_peer_ends_listeners_and_questions_with_its_error() -> None:
    world = LocalWorld(2)

    async def serve(wire: Wire) -> None:
        async for _ in wire.listen(LIKE):
            pass

    with Worker(world.lane(0)) as me:
        serving = me.serve(serve)
        world.lose(PeerLost("worker 1 is gone", rank=1))
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            serving.wait(500)

        async def ask(wire: Wire) -> None:
            await wire.ask(numbers(1), to=1)

        with pytest.raises(PeerLost, match="worker 1 is gone"):
            me.do(ask)


def test_some_may_listen_and_others_not() -> None:
    """Goodbyes end exactly the open receives, whoever has one."""

    def worker(lane: LocalLane) -> LocalWorld:
        async def serve(wire: Wire) -> None:
            if wire.rank in (1, 2):
                async for _ in wire.listen(LIKE):
                    pass

        with Worker(lane) as me:
            serving = me.serve(serve)
            me.pause(serving)
            me.leave()
        return lane._world

    assert not run_threads(4, worker)[0].open


def test_a_message_handled_while_a_pause_looks_is_not_missed() -> None:
    """The listener's thread may be faster than the one that pauses, at any point."""
    endpoint, inline = Endpoint(LocalWorld(1).lane(0), Meter()), Inline()
    messenger = endpoint.messenger

    class Counts(list[int]):
        def __iter__(self) -> Iterator[int]:
            seen = list.copy(self)
            if seen == [0]:
                messenger.handled(0)
            return iter(seen)

    messenger._handled = Counts([0])
    messenger.send(numbers(1), 0, 0)
    task = endpoint.start(inline.driver, "settle", messenger.quiesce)
    inline.settle()
    assert task.done()


def test_a_listener_that_holds_has_one_message_of_each_sender_and_tag() -> None:
    world, inline = LocalWorld(2), Inline()
    ends = [Endpoint(world.lane(rank), Meter()) for rank in range(2)]
    came: list[tuple[int, float]] = []

    async def serve(wire: Wire) -> None:
        async for _, tag, data in wire.listen(LIKE, holds=True):
            came.append((tag, data.item()))

    serving = ends[0].start(inline.driver, "serve", serve)
    sent = {
        (tag, value): ends[1].messenger.send(numbers(value), 0, tag) for value in range(4) for tag in (7, 8)
    }
    inline.settle()
    assert came == [(7, 0), (8, 0)]
    assert [key for key, work in sent.items() if work.done()] == came  # the sender sees who was taken
    ends[0].wire().release(source=1, tag=8)
    inline.settle()
    assert came[2:] == [(8, 1)]
    tasks = [end.start(inline.driver, "settle", end.messenger.quiesce) for end in ends]  # takes all others
    inline.settle()
    assert sorted(came) == sorted(sent)
    assert all(task.done() for task in (*tasks, *sent.values(), serving))
    ends[0].wire().release(source=1, tag=8)  # which is nobody's any more


def test_who_waits_for_its_own_answer_learns_that_another_worker_is_gone() -> None:
    """An owner that asks itself waits for others to come: it must not wait for one that never will."""
    world, inline, error = LocalWorld(2), Inline(), PeerLost("worker 1 is gone", rank=1)
    endpoint = Endpoint(world.lane(0), Meter())

    async def serve(wire: Wire) -> None:
        async for _ in wire.listen(LIKE):
            pass  # answers later

    async def ask(wire: Wire) -> None:
        await wire.ask(numbers(1.0), to=0)

    serving = endpoint.start(inline.driver, "serve", serve)
    asked = [endpoint.start(inline.driver, "mix", ask)]
    inline.settle()
    assert not asked[0].done()
    world.lose(error)
    asked.append(endpoint.start(inline.driver, "mix", ask))
    inline.settle()
    for task in (serving, *asked):
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            task.wait(0)
