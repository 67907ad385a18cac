"""StochasticGradientPush: mass and weighted mean are conserved, however late messages come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.engine.saving import Job, run
from tests.strategies.gossip.world import SIZES, GossipWorld, by_number
from tests.worlds import run_threads
from thinwire.compress.payload import Payload
from thinwire.errors import SettingError
from thinwire.strategies.gossip.chunks import WindowPosition
from thinwire.strategies.gossip.encoding import Encoding
from thinwire.strategies.stochastic_gradient_push import (
    _HEAD,
    LEAST_MASS,
    PATIENCE,
    PushState,
    _Arrival,
    _Channel,
)
from thinwire.wire.base import Lane
from thinwire.wire.local import LocalLane
from thinwire.wire.work import Work

PAYLOADS: tuple[Payload, ...] = get_args(Payload)
SHARES = (1.0, 0.7, 0.25)
STRATEGIES = [
    tw.StochasticGradientPush(payload=payload, share=share) for payload in PAYLOADS for share in SHARES
]
Account = Callable[[int, Tensor, Tensor, int], None]
"""Of a bucket: values and masses of a message, added (1) or taken off (-1)."""


class AccountedChannel(_Channel):
    """Tells of what is folded in."""

    def __init__(self, channel: _Channel, index: int, state: PushState, account: Account) -> None:
        super().__init__(channel.chunks, channel.like)
        self._index, self._state, self._account = index, state, account
        self.most = 0
        """Tensors that have waited for the training thread at one time."""

    def add(self, new: _Arrival) -> None:
        super().add(new)
        self.most = max(self.most, len(self.arrived))

    def take(self) -> _Arrival | None:
        arrival = super().take()
        if arrival is not None:
            masses = by_number(self._state, self._index, arrival.masses)
            self._account(self._index, arrival.values, masses, -1)
        return arrival


def by_chunk(state: PushState, index: int, chunks: Any, masses: list[float]) -> Tensor:
    """The masses of some chunks of a bucket, for each of its numbers."""
    given = dict(zip(chunks, masses, strict=True))
    return by_number(state, index, [given.get(c, 0.0) for c in range(len(state.channels[index].chunks))])


class PushWorld(GossipWorld):
    """Keeps account of the messages that were sent and are not folded in yet."""

    def __init__(self, strategy: tw.StochasticGradientPush, world_size: int, **settings: Any) -> None:
        super().__init__(strategy, world_size, **settings)
        self.values = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        """Under way, by bucket: values weighted by their masses."""
        self.under_way = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        """Under way, by bucket: masses."""
        for core, state in zip(self.cores, self.states, strict=True):
            state.channels = [
                AccountedChannel(channel, index, state, self._account)
                for index, channel in enumerate(state.channels)
            ]
            self._spy_on(core.groups[0].endpoint.messenger, state)

    def _spy_on(self, messenger: Any, state: PushState) -> None:
        send = messenger.send

        def spy(data: Tensor, to: int, tag: int) -> Work:
            assert to != messenger._lane.rank
            self._account(*decode(data, state), 1)
            work: Work = send(data, to, tag)
            return work

        messenger.send = spy

    def _account(self, index: int, values: Tensor, masses: Tensor, sign: int) -> None:
        self.values[index] += sign * masses * values
        self.under_way[index] += sign * masses

    def check(self) -> None:
        """Over workers and messages under way: masses add up, and so do the values weighted by them."""
        total, mass = (
            self.weighted_sum() + torch.cat(self.values),
            self.mass_sum() + torch.cat(self.under_way),
        )
        assert (total - self.expected).abs().max() < 1e-12 * self.world_size
        assert (mass - self.world_size).abs().max() < 1e-12 * self.world_size


def decode(message: Tensor, state: PushState) -> tuple[int, Tensor, Tensor]:
    """Bucket, values and masses of a message."""
    head = message[: 8 * _HEAD].view(torch.float64).tolist()
    index, _, first, count, payload = (int(number) for number in head)
    window = state.channels[index].chunks.window(WindowPosition(first), count)
    body_at = 8 * (_HEAD + count)
    masses = message[8 * _HEAD : body_at].view(torch.float64).tolist()
    encoding = Encoding(window.spans[0], 8, PAYLOADS[payload], 0)
    likes = [torch.empty(part.stop - part.start, dtype=torch.float64) for part in encoding.parts]
    parts = encoding.read(index, message[body_at:], likes, state.memory)
    return (
        index,
        encoding.spread(parts, SIZES[index]),
        by_chunk(state, index, window.chunks, masses),
    )


CASES = [
    *product(STRATEGIES, [2, 5]),
    *product([replace(strategy, topology="hypercube") for strategy in STRATEGIES], [8]),
    *product(STRATEGIES[::4], [33]),
]


@pytest.mark.parametrize(("strategy", "world_size"), CASES, ids=repr)
def test_nothing_is_lost_however_late_messages_come(
    strategy: tw.StochasticGradientPush, world_size: int
) -> None:
    """Workers step at random, and messages arrive at random."""
    world = PushWorld(strategy, world_size, seed=world_size)
    for _ in range(12):
        for rank in world.random.sample(range(world_size), k=world_size // 2 + 1):
            world.land(rank)
            world.update(rank)
            world.launch(rank)
            world.carry(share=world.random.choice([0.0, 0.1, 0.5]))
        for rank in range(world_size):
            world.land(rank)
        world.check()
    assert any(each.any() for each in world.under_way)
    assert sum(state.skipped_rounds for state in world.states) > 0
    world.synchronize()
    world.check()
    assert all(each.abs().max() < 1e-12 for each in world.under_way), "nothing is left on the wire"
    for rank in range(world_size):  # and it goes on
        world.land(rank)
        world.update(rank)
    world.round()
    world.check()
    world.synchronize()
    world.check()


@pytest.mark.parametrize("strategy", STRATEGIES[2::3], ids=repr)
def test_workers_come_together(strategy: tw.StochasticGradientPush) -> None:
    """Also where the window's rounds and the schedule's have a common divisor (4 and 4, here)."""
    world = GossipWorld(strategy, 16, alike=False)
    for _ in range(90):  # the smallest bucket is not divided evenly, and mixes more slowly than the others
        world.round()
    mean = world.expected / 16
    limit = {"fp32": 1e-3, "bf16": 2e-2, "int8": 2e-2}[strategy.payload]
    for rank in range(16):
        assert (world.flat(rank) - mean).abs().max() < limit


def test_a_worker_with_little_mass_keeps_it() -> None:
    """Worker 0 sends and hears of nobody; the others fold in what it sends."""
    strategy = tw.StochasticGradientPush()
    world = PushWorld(strategy, 3)
    for step in range(8):
        world.land(0)
        world.launch(0)
        while world.medium.held:
            world.carry()
        for core, state in zip(world.cores[1:], world.states[1:], strict=True):
            for bucket in core.buckets:
                strategy._fold(bucket, step, state, core.groups[0].endpoint.wire())
    assert world.states[0].skipped_rounds == 3 * len(SIZES)
    assert {mass for masses in world.states[0].masses for mass in masses} == {LEAST_MASS / 2}
    world.check()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_who_makes_no_steps_stops_nobody(strategy: tw.StochasticGradientPush) -> None:
    """Worker 0 receives, but its training stands still for a hundred steps: it gets no more mass than two
    messages of each other worker have, and keeps one sum per bucket; the others mix all the time."""
    world = PushWorld(strategy, 4, alike=False)
    steps, sent = 100, []
    for _ in range(steps):
        for rank in (1, 2, 3):
            world.land(rank)
            world.update(rank)
            world.launch(rank)
        for _ in range(20):
            world.carry()
        for rank in (1, 2, 3):
            world.land(rank)
        sent.append(len(world.medium.sent))
        world.check()
    assert sent[-1] - sent[-1 - PATIENCE] > 2 * 3 * PATIENCE // 2  # header and payload of a message
    for rank in (1, 2, 3):
        assert min(map(min, world.states[rank].masses)) >= LEAST_MASS / 2
        assert max(map(len, (channel.outgoing for channel in world.states[rank].channels))) <= 3
        others = [world.flat(other) for other in (1, 2, 3)]
        assert (world.flat(rank) - sum(others) / 3).abs().max() < 1  # 4 if they only trained
    assert [channel.most for channel in world.states[0].channels] == [1, 1, 1]
    assert all(len(channel.arrived[0].sent) == 3 for channel in world.states[0].channels)
    world.synchronize()  # it goes on, and everything comes back
    world.check()
    assert all(each.abs().max() < 1e-12 for each in world.under_way)
    for _ in range(40):
        world.round()
    assert max((world.flat(rank) - world.expected / 4).abs().max() for rank in range(4)) < 0.3
    world.check()


def test_a_frozen_worker_holds_back_only_its_own_messages() -> None:
    """Worker 0 does not even receive."""
    world = PushWorld(tw.StochasticGradientPush(), 4, alike=False)
    transfer = world.medium.transfer
    lost: list[tuple[int, int]] = []

    def carry(source: int, to: int, num_bytes: int, sent: Any, arrived: Any) -> None:
        lost.append((source, to)) if to == 0 else transfer(source, to, num_bytes, sent, arrived)

    world.medium.transfer = carry  # type: ignore[method-assign]
    skipped: list[list[int]] = []
    for _ in range(4 * PATIENCE):
        for rank in (1, 2, 3):
            world.land(rank)
            world.launch(rank)
        for _ in range(20):
            world.carry()
        skipped.append([state.skipped_rounds for state in world.states])
    assert len(lost) <= 3 * 2 * len(SIZES)  # header and payload of one message per sender and bucket
    for rank in (1, 2, 3):
        rounds = PATIENCE * len(SIZES)  # of the last quarter, of which a third would go to worker 0
        assert skipped[-1][rank] - skipped[-1 - PATIENCE][rank] < rounds / 2
    assert (world.flat(1) - world.flat(2)).abs().max() < 1e-3


def test_late_messages_are_counted() -> None:
    world = PushWorld(tw.StochasticGradientPush(), 2)
    for _ in range(2):  # worker 0 is two steps ahead when it hears of the first of worker 1
        world.land(0)
        world.launch(0)
    world.launch(1)
    while world.medium.held:
        world.carry()
    world.land(0)
    world.land(1)
    assert [state.late_rounds for state in world.states] == [len(SIZES), 0]


# -- with the engine ----------------------------------------------------------------------------------


def check_training(
    strategy: tw.StochasticGradientPush, lane: Lane | None, steps: int = 15
) -> dict[str, float]:
    """Train with random gradients, delays and pauses: steps move the weighted sum over workers, and nothing
    else does. Called by all workers; gives the instruments of this one."""
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dice, generator = random.Random(), torch.Generator()
    with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=256, timeout_s=500) as link:
        buckets, state = link._core.buckets, link._core.groups[0].state
        dice.seed(link.rank)
        generator.manual_seed(link.rank)
        parameters = [p for bucket in buckets for p in bucket.parameters]
        start = torch.cat([bucket.read() for bucket in buckets])
        moved = torch.zeros_like(start)

        def record(*_: object) -> None:
            """After messages have come back, before the step: how far it will move the weighted sum."""
            gradient = torch.cat([p.grad.view(-1) for p in parameters if p.grad is not None])
            moved.sub_(0.1 * all_masses(state) * gradient)

        optimizer.register_step_pre_hook(record)
        for step in range(steps):
            time.sleep(dice.choice([0.0, 0.0, 0.002, 0.01]))
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()
            if step in (steps // 3, steps // 2):
                link.synchronize()  # a pause
        link.synchronize()
        assert not any(channel.arrived for channel in state.channels)
        assert all(work.done() for channel in state.channels for _, work in channel.outgoing.values())
        masses, own = all_masses(state), torch.cat([bucket.read() for bucket in buckets])
        expected = link.world_size * start + torch.tensor(link.all_reduce(moved.tolist()), dtype=start.dtype)
        assert link.all_reduce((masses * own).tolist()) == pytest.approx(expected.tolist(), abs=1e-11)
        assert link.all_reduce(masses.tolist()) == pytest.approx([link.world_size] * len(own), abs=1e-12)
        return dict(link.stats.instruments)


def all_masses(state: PushState) -> Tensor:
    """For each of a worker's parameters."""
    return torch.cat([by_number(state, index, masses) for index, masses in enumerate(state.masses)])


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=repr)
@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_is_lost_in_threads(strategy: tw.StochasticGradientPush, world_size: int) -> None:
    instruments = run_threads(world_size, lambda lane: check_training(strategy, lane))
    assert sum(each["mass"] for each in instruments) == pytest.approx(world_size, abs=1e-9)
    assert {each["payload_bits"] for each in instruments} == {
        {"fp32": 32, "bf16": 16, "int8": 8}[strategy.payload]
    }


def test_nobody_waits_for_a_slow_worker() -> None:
    """Worker 0 makes no step before all others have ended theirs."""
    others_done = threading.Semaphore(0)

    def worker(lane: LocalLane) -> dict[str, float]:
        model, optimizer = model_and_optimizer()
        strategy = tw.StochasticGradientPush()
        with tw.attach(model, optimizer, strategy, process_group=lane, timeout_s=500) as link:
            if link.rank == 0:
                for _ in range(3):
                    assert others_done.acquire(timeout=500), "the others wait"
            masses = []
            for step in range(8):
                step_once(model, optimizer, step, link.rank)
                masses.append(link.stats.instruments["mass"])
            if link.rank > 0:
                others_done.release()
            else:
                assert max(masses) > 0.5  # it has received: its first message took half of what it had
            assert min(masses) >= LEAST_MASS / 2  # who has little left keeps it
            link.synchronize()
            assert link.all_reduce([link.stats.instruments["mass"]])[0] == pytest.approx(4, abs=1e-9)
            return dict(link.stats.instruments)

    assert sum(each["late_rounds"] for each in run_threads(4, worker)) > 0


@pytest.mark.parametrize("payload", PAYLOADS)
def test_goes_on_with_another_number_of_workers(tmp_path: Path, payload: Payload) -> None:
    strategy = tw.StochasticGradientPush(payload=payload)
    run(3, Job(folder=tmp_path, until=4, save_at=(4,), strategy=strategy))
    for world_size, until in ((2, 6), (4, 8)):
        job = Job(folder=tmp_path, until=until, save_at=(until,), strategy=strategy)
        for each in run(world_size, job):
            assert each.saved is not None
            assert all(weight.isfinite().all() for weight in each.weights)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topology": "ring"}, "topology must be one of 'dissemination', 'hypercube', got 'ring'"),
        ({"payload": "fp8"}, "payload must be one of 'fp32', 'bf16', 'int8', got 'fp8'"),
        ({"share": 0.0}, "share must be a number above 0 and at most 1, got 0.0"),
        ({"share": 1.5}, "share must be a number above 0 and at most 1, got 1.5"),
        ({"share": "auto"}, "share must be a number, got 'auto'"),
    ],
)
def test_wrong_settings_name_field_rule_and_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=f"StochasticGradientPush.{words}"):
        tw.StochasticGradientPush(**settings)


def test_a_hypercube_needs_a_power_of_two() -> None:
    with pytest.raises(SettingError, match="topology must be 'dissemination' with 3 workers"):
        PushWorld(tw.StochasticGradientPush(topology="hypercube"), 3)
