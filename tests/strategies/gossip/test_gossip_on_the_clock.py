"""Gossip that depends on time, on a virtual clock: there it can be repeated."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contract.table import BY_THE_CLOCK
from tests.simulate.training import COMPUTE_S, STEPS, on_the_clock, weights
from thinwire.compress.payload import payload_bytes
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_times
from thinwire.strategies.base import Strategy


@pytest.mark.parametrize("strategy", BY_THE_CLOCK, ids=repr)
def test_the_same_clock_gives_the_same_bits(strategy: Strategy) -> None:
    start = weights()
    first, second = (
        on_the_clock(strategy, 3, start, dropout=True, batched=False, slow=("1=0.7",))[0] for _ in range(2)
    )
    assert all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_others_keep_their_speed_beside_a_slow_one() -> None:
    start, slow = weights(), ("4=0.5",)
    together, apart = dict[int, float](), dict[int, float]()
    on_the_clock(tw.AllReduce(), 5, start, dropout=False, batched=True, slow=slow, ended_s=together)
    on_the_clock(tw.StochasticGradientPush(), 5, start, dropout=False, batched=True, slow=slow, ended_s=apart)
    alone_s = STEPS * COMPUTE_S
    assert min(together.values()) > 1.9 * alone_s
    assert max(apart[host] for host in range(4)) < alone_s / 0.95
    assert apart[4] == pytest.approx(2 * alone_s, rel=0.05)


def test_push_sum_of_sizes_alone_never_waits() -> None:
    """A message of 0.4 s every second step, since the wire takes no more."""
    network = Network(describe(hosts=5, rate="100mbit"), latency_s=0.001)
    strategy = tw.StochasticGradientPush()
    times = step_times([(250, 500)] * 10, network, strategy, ComputeModel.of(0.3), steps=10)
    assert times.step_s == pytest.approx(0.3)
    assert times.exposed_s == 0
    assert times.sent_bytes == pytest.approx(5_000_000 / 2, rel=0.2)


@pytest.mark.parametrize("rate", ["250mbit", "50mbit", "12500kbit", "3mbit"])
def test_auto_never_waits_and_uses_the_wire(rate: str) -> None:
    """A quarter of 5 M parameters at a quarter of 1 Gbit/s, 200, 50 and 12 Mbit/s."""
    description = describe(hosts=4, rate=rate)
    times = step_times(
        [(250, 500)] * 10,
        Network(description, latency_s=0.0004),
        tw.GossipGraD(share="auto"),
        ComputeModel.of(0.3),
        steps=16,
    )
    assert times.step_s < 0.3 / 0.97
    whole = payload_bytes("int8", 1_250_000, 4)
    use = 8 * times.sent_bytes / (description.hosts[0].rate_bit_per_s * times.step_s)
    assert use > 0.7 or times.sent_bytes > 0.99 * whole
