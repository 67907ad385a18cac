"""The simulator trains what real workers train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contract.table import STRATEGIES
from tests.contract.toys import ParameterServer
from tests.simulate.toys import EveryFew, Gossip, TreeTopK
from tests.simulate.training import for_real, on_the_clock, weights
from tests.worlds import run_threads
from thinwire.errors import UsageError
from thinwire.strategies.base import Strategy

TOYS: list[Strategy] = [TreeTopK(), EveryFew()]
"""Without those whose result depends on who comes first."""


def worst(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *TOYS], ids=repr)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_as_threads(strategy: Strategy, world_size: int) -> None:
    start = weights()
    real = run_threads(
        world_size, lambda lane: for_real(strategy, lane, lane.rank, world_size, start, dropout=False)
    )
    alone, _ = on_the_clock(strategy, world_size, start, dropout=False, batched=False)
    assert all(torch.equal(a, b) for x, y in zip(alone, real, strict=True) for a, b in zip(x, y, strict=True))


AGREEING = [each for each in STRATEGIES if each.replicas_agree and each.overlap != "forward"]


@pytest.mark.parametrize("strategy", AGREEING, ids=repr)
def test_one_step_for_all_is_everyones_own(strategy: Strategy) -> None:
    """Also where the one whose optimizer makes it comes neither first nor last."""
    start, slow = weights(), ("0=0.7", "2=0.5")
    own, lockstep = (
        on_the_clock(strategy, 3, start, dropout=True, batched=True, lockstep=lockstep, slow=slow)[0]
        for lockstep in (False, True)
    )
    assert all(
        torch.equal(a, b) for x, y in zip(own, lockstep, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_replicas_that_do_not_agree_after_all_are_refused() -> None:
    with pytest.raises(UsageError, match=r"replicas_agree of a strategy must be False .* got True"):
        on_the_clock(EveryFew(), 3, weights(), dropout=False, batched=True, lockstep=True)


@pytest.mark.parametrize("shuffle", ["own", "ring"])
def test_the_same_samples_as_in_threads(shuffle: str) -> None:
    start = weights()
    real = run_threads(
        3, lambda lane: for_real(Gossip(), lane, lane.rank, 3, start, dropout=False, shuffle=shuffle)
    )
    ours, _ = on_the_clock(Gossip(), 3, start, dropout=False, batched=False, shuffle=shuffle)
    assert all(torch.equal(a, b) for x, y in zip(ours, real, strict=True) for a, b in zip(x, y, strict=True))
    others, _ = on_the_clock(Gossip(), 3, start, dropout=False, batched=False)
    assert worst(others, ours) > 1e-3


@pytest.mark.parametrize("strategy", [tw.AllReduce(), Gossip()], ids=repr)
def test_batched_replicas_learn_the_same_from_the_same_random_numbers(strategy: Strategy) -> None:
    start = weights()
    alone, _ = on_the_clock(strategy, 4, start, dropout=True, batched=False)
    together, _ = on_the_clock(strategy, 4, start, dropout=True, batched=True)
    assert worst(together, alone) < 1e-9


def test_dropout_drops() -> None:
    start = weights()
    with_it, _ = on_the_clock(Gossip(), 2, start, dropout=True, batched=True)
    without, _ = on_the_clock(Gossip(), 2, start, dropout=False, batched=True)
    assert worst(without, with_it) > 1e-3


def test_a_server_lets_a_slow_worker_be_slow() -> None:
    start, equal, unequal = weights(), dict[int, float](), dict[int, float]()
    on_the_clock(ParameterServer(), 3, start, dropout=False, batched=True, ended_s=equal)
    slow = ("2=0.5",)
    _, session = on_the_clock(
        ParameterServer(), 3, start, dropout=False, batched=True, slow=slow, ended_s=unequal
    )
    assert unequal[1] == pytest.approx(equal[1], rel=0.02)
    assert unequal[2] == pytest.approx(2 * equal[2], rel=0.02)
    state, sent = (
        session.worker(0).core.groups[0].state,
        [session.worker(host).core.steps for host in range(3)],
    )
    num_buckets = len(session.worker(0).core.buckets)
    assert state.served == [steps * num_buckets for steps in sent], "every message was answered"


def test_late_gossip_hides_a_slow_step() -> None:
    start = weights()
    _, strict = on_the_clock(Gossip(), 4, start, dropout=False, batched=True)
    _, late = on_the_clock(Gossip(slack=2), 4, start, dropout=False, batched=True)
    assert late.clock.now_s <= strict.clock.now_s
