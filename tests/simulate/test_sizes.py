"""Sizes alone: overlap is modelled, and many workers cost seconds."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Literal

import pytest

import thinwire as tw
from tests.contract.toys import ParameterServer
from tests.simulate.toys import EveryFew, Gossip
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel, Pace, timetable
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import StepTimes, step_ends, step_times, traffic
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic

LAYERS = [(500, 500)] * 8  # a megabyte each
BUCKET_BYTES = 250_000  # so each is a bucket, which travels in four pieces under overlap="forward"


def timed(strategy: Strategy, *, hosts: int = 4, rate: str = "800mbit", jitter: float = 0.0) -> StepTimes:
    network = Network(describe(hosts=hosts, rate=rate), latency_s=0.0)
    model = ComputeModel(forward_s=0.04, backward_s=0.08, bucket_bytes=BUCKET_BYTES)
    return step_times(LAYERS, network, strategy, model, steps=4, jitter=jitter)


def test_overlap_hides_what_it_can() -> None:
    whole_s = 8 * 1_000_012 * 1.5 / 1e8  # 8 buckets with their tails, 3/4 of each twice, 100 MB/s
    assert timed(tw.Silent()).step_s == pytest.approx(0.12)
    none, backward, forward = (timed(tw.AllReduce(overlap=o)) for o in ("none", "backward", "forward"))
    assert none.step_s == pytest.approx(0.12 + whole_s, rel=1e-6)
    # the first bucket is full after an eighth of backward; from then on the wire is never idle
    assert backward.step_s == pytest.approx(0.04 + 0.01 + whole_s, rel=1e-6)
    assert backward.exposed_s == pytest.approx(backward.step_s - 0.12, rel=1e-6)
    assert whole_s < forward.step_s < backward.step_s - 0.02
    assert none.sent_bytes == backward.sent_bytes == pytest.approx(8 * 1_000_012 * 1.5)


def test_a_slow_wire_leaves_only_the_wire() -> None:
    assert timed(tw.AllReduce(overlap="forward"), rate="80mbit").exposed_s > 1.0


def test_nothing_hides_behind_the_optimizer() -> None:
    """What is sent after a step must be there before the next one begins."""
    network = Network(describe(hosts=4, rate="800mbit"), latency_s=0.0)
    whole_s = 8 * 1_000_000 / 1e8
    for optimizer_s in (0.0, 0.03):
        model = ComputeModel(
            forward_s=0.02, backward_s=0.04, optimizer_s=optimizer_s, bucket_bytes=BUCKET_BYTES
        )
        silent = step_times(LAYERS, network, tw.Silent(), model)
        assert silent.step_s == pytest.approx(0.06 + optimizer_s)
        sends = step_times(LAYERS, network, Gossip(), model, steps=4)
        assert sends.step_s == pytest.approx(whole_s + optimizer_s, rel=1e-6)
    plain = timed(tw.AllReduce(overlap="forward"))
    slower = step_times(
        LAYERS,
        Network(describe(hosts=4, rate="800mbit"), latency_s=0.0),
        tw.AllReduce(overlap="forward"),
        ComputeModel(forward_s=0.04, backward_s=0.08, optimizer_s=0.3, bucket_bytes=BUCKET_BYTES),
        steps=4,
    )
    assert slower.step_s > max(plain.step_s, 0.42)


def test_gossip_takes_as_long_with_many_as_with_few() -> None:
    few, many = timed(Gossip(), hosts=4), timed(Gossip(), hosts=32)
    assert many.step_s == pytest.approx(few.step_s)
    assert many.sent_bytes == few.sent_bytes == 8_000_000


def test_varying_speed_makes_everybody_wait_for_the_slowest() -> None:
    even, uneven = timed(tw.AllReduce(), hosts=16), timed(tw.AllReduce(), hosts=16, jitter=0.2)
    assert uneven.step_s > 1.05 * even.step_s
    alone = timed(tw.Silent(), hosts=16, jitter=0.2)
    assert alone.exposed_s == 0


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
def test_one_worker_played_for_all_of_its_speed(
    overlap: Literal["none", "backward", "forward"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> StepTimes:
        network = Network(describe(hosts=5, rate="80mbit*4,40mbit", slow=("1=0.5", "3=0.5")), latency_s=0.001)
        model = ComputeModel.of(0.12, bucket_bytes=BUCKET_BYTES)
        return step_times(LAYERS, network, tw.AllReduce(overlap=overlap), model, steps=3)

    alike = play()
    monkeypatch.setattr("thinwire.simulate.sizes.replace", lambda model, **_: model)
    assert asdict(alike) == pytest.approx(asdict(play()))


def test_hundreds_of_workers_take_moments() -> None:
    began_s = time.process_time()
    timed(tw.AllReduce(), hosts=200)
    assert time.process_time() - began_s < 30  # one on an idle machine


def test_pace_varies_around_one() -> None:
    steady, vary = Pace(0.5), Pace(0.5, jitter=0.3, seed=(1, 2))
    assert steady.draw() == 2.0
    drawn = [vary.draw() / 2 for _ in range(4000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(1.0, abs=0.03)
    assert (sum((d - mean) ** 2 for d in drawn) / len(drawn)) ** 0.5 == pytest.approx(0.3, abs=0.05)


def test_timetable() -> None:
    full, needs = timetable([1, 1, 2], [[2, 1], [0]])
    assert full == [0.75, 1.0]
    assert needs == [(1, 0.0), (0, 0.25)]


def test_whole_periods_are_timed() -> None:
    """However few steps are asked for: a mean every fourth step is in the measurement once."""
    network = Network(describe(hosts=4, rate="800mbit"), latency_s=0.0)
    model = ComputeModel.of(0.12, bucket_bytes=BUCKET_BYTES)
    times = step_times(LAYERS, network, EveryFew(interval=4), model, steps=1)
    assert times.sent_bytes == 8_000_000 * 1.5 / 4
    assert times.step_s == pytest.approx(0.12 + times.sent_bytes / 1e8, rel=1e-6)


@pytest.mark.parametrize("strategy", [tw.AllReduce(), tw.SASGD(interval=3), tw.PostLocal(exact_steps=30)])
def test_the_ends_of_late_steps_follow_from_earlier_ones(strategy: Strategy) -> None:
    """Steps that are not played end when they would end."""
    network = Network(describe(hosts=4, rate="800mbit"), latency_s=0.001)
    model = ComputeModel.of(0.12, bucket_bytes=BUCKET_BYTES)
    ends = step_ends(LAYERS, network, strategy, model, [1, 40, 121])
    every = step_ends(LAYERS, network, strategy, model, list(range(1, 122)))
    assert [every[0], every[39], every[120]] == ends
    played = step_times(LAYERS, network, strategy, model, steps=24)
    assert (ends[2] - ends[1]) / 81 == pytest.approx(played.step_s, rel=0.02)
    assert ends[0] >= 0.12


def test_traffic_is_that_of_the_strategy_by_worker() -> None:
    # each bucket has 12 bytes of bookkeeping
    one = Traffic(sent_bytes=12_000_144, received_bytes=12_000_144, messages=8 * 6)
    played = traffic(LAYERS, 4, tw.AllReduce(), steps=3, bucket_bytes=BUCKET_BYTES)
    assert played == [one + one + one] * 4
    assert traffic(LAYERS, 4, EveryFew(interval=4), steps=3) == [Traffic()] * 4
    assert traffic(LAYERS, 1, tw.AllReduce(), steps=3) == [Traffic()]
    server = traffic(LAYERS, 3, ParameterServer(), steps=2, bucket_bytes=BUCKET_BYTES)
    pause = 26  # bytes of the two collectives at the end
    asked, answered = 2 * 8 * (1_000_000 + 24), 2 * 8 * 1_000_000
    assert server[1] == server[2] == Traffic(asked + pause, answered + pause, 2 * 8 + 6)
    assert server[0] == Traffic(2 * answered + pause, 2 * asked + pause, 2 * 2 * 8 + 6)


@pytest.mark.parametrize("strategy", [tw.TopK(), tw.GTopK(), tw.OkTopK()], ids=repr)
def test_top_k_has_room_for_as_many_numbers_whatever_they_are(strategy: Strategy) -> None:
    """Messages of fixed size can be played without numbers."""
    played, dense = timed(strategy), timed(tw.AllReduce())
    assert played.sent_bytes < 0.02 * dense.sent_bytes
    assert played.step_s == pytest.approx(0.12, abs=0.001)
