"""Sizes alone: overlap is modelled, and many workers cost seconds."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Literal

import pytest

import thinwire as tw
from tests.simulate.toys import Gossip
from thinwire.hosts.description import describe
from thinwire.simulate.network import Network
from thinwire.simulate.pace import Compute, Pace, Timetable
from thinwire.simulate.sizes import Paced, pace
from thinwire.simulate.worker import Ways
from thinwire.strategies.base import Strategy

LAYERS = [(500, 500)] * 8  # a megabyte each
BUCKET_BYTES = 250_000  # so each is a bucket, which travels in four pieces under overlap="forward"


def paced(strategy: Strategy, *, hosts: int = 4, rate: str = "800mbit", jitter: float = 0.0) -> Paced:
    network = Network(describe(hosts=hosts, rate=rate), latency_s=0.0)
    ways = Ways(compute=Compute(forward_s=0.04, backward_s=0.08), bucket_bytes=BUCKET_BYTES)
    return pace(LAYERS, network, strategy, ways, steps=4, jitter=jitter)


def test_overlap_hides_what_it_can() -> None:
    whole_s = 8 * 1_000_012 * 1.5 / 1e8  # 8 buckets with their tails, 3/4 of each twice, 100 MB/s
    assert paced(tw.Silent()).step_s == pytest.approx(0.12)
    none, backward, forward = (paced(tw.AllReduce(overlap=o)) for o in ("none", "backward", "forward"))
    assert none.step_s == pytest.approx(0.12 + whole_s, rel=1e-6)
    # the first bucket is full after an eighth of backward; from then on the wire is never idle
    assert backward.step_s == pytest.approx(0.04 + 0.01 + whole_s, rel=1e-6)
    assert backward.exposed_s == pytest.approx(backward.step_s - 0.12, rel=1e-6)
    assert whole_s < forward.step_s < backward.step_s - 0.02
    assert none.sent_bytes == backward.sent_bytes == pytest.approx(8 * 1_000_012 * 1.5)


def test_a_slow_wire_leaves_only_the_wire() -> None:
    assert paced(tw.AllReduce(overlap="forward"), rate="80mbit").exposed_s > 1.0


def test_gossip_takes_as_long_with_many_as_with_few() -> None:
    few, many = paced(Gossip(), hosts=4), paced(Gossip(), hosts=32)
    assert many.step_s == pytest.approx(few.step_s)
    assert many.sent_bytes == few.sent_bytes == 8_000_000


def test_varying_speed_makes_everybody_wait_for_the_slowest() -> None:
    even, uneven = paced(tw.AllReduce(), hosts=16), paced(tw.AllReduce(), hosts=16, jitter=0.2)
    assert uneven.step_s > 1.05 * even.step_s
    alone = paced(tw.Silent(), hosts=16, jitter=0.2)
    assert alone.exposed_s == 0


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
def test_one_worker_played_for_all_of_its_speed(
    overlap: Literal["none", "backward", "forward"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> Paced:
        network = Network(describe(hosts=5, rate="80mbit*4,40mbit", slow=("1=0.5", "3=0.5")), latency_s=0.001)
        ways = Ways(compute=Compute.of(0.12), bucket_bytes=BUCKET_BYTES)
        return pace(LAYERS, network, tw.AllReduce(overlap=overlap), ways, steps=3)

    alike = play()
    monkeypatch.setattr("thinwire.simulate.sizes.replace", lambda ways, **_: ways)
    assert asdict(alike) == pytest.approx(asdict(play()))


def test_hundreds_of_workers_take_moments() -> None:
    began_s = time.process_time()
    paced(tw.AllReduce(), hosts=200)
    assert time.process_time() - began_s < 30  # one on an idle machine


def test_pace_varies_around_one() -> None:
    steady, vary = Pace(0.5), Pace(0.5, jitter=0.3, seed=(1, 2))
    assert steady.draw() == 2.0
    drawn = [vary.draw() / 2 for _ in range(4000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(1.0, abs=0.03)
    assert (sum((d - mean) ** 2 for d in drawn) / len(drawn)) ** 0.5 == pytest.approx(0.3, abs=0.05)


def test_timetable() -> None:
    table = Timetable([1, 1, 2], [[2, 1], [0]])
    assert table.full == [0.75, 1.0]
    assert table.needs == [(1, 0.0), (0, 0.25)]
