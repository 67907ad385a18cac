"""Calls of a link that workers do not make together: named on all of them, never an abort of the process."""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import run_processes, run_threads
from thinwire.errors import PeerDiffers, PeerError
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane


def train(strategy: Strategy, lane: LocalLane | None = None) -> str:
    """Worker 0 asks for a sum, and the others for an average, or detach."""
    model, optimizer = model_and_optimizer()

    def disagree() -> None:
        with tw.attach(model, optimizer, strategy, process_group=lane, timeout_s=500) as link:
            for step in range(2):
                step_once(model, optimizer, step, link.rank)
            if link.rank == 0:
                link.all_reduce([1.0, 2.0, 3.0])
            elif link.rank == 1:
                link.average_()

    with pytest.raises(PeerError) as caught:  # or learns it from another worker
        disagree()
    return str(caught.value)


STRATEGIES = [tw.AllReduce(), tw.GossipGraD(), tw.StochasticGradientPush()]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


@every_strategy
def test_threads(strategy: Strategy) -> None:
    for message in run_threads(2, lambda lane: train(strategy, lane)):
        assert "worker 1 is in link.average_ while worker 0 is in link.all_reduce of 3 numbers" in message


@pytest.mark.processes
@every_strategy
def test_processes(strategy: Strategy) -> None:
    for message in run_processes(3, train, strategy):
        assert "while worker 0 is in link.all_reduce of 3 numbers" in message
        assert "hint: all workers call the methods of a link, and detach, in the same order" in message


def test_other_sizes_are_named_too() -> None:
    def ask(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane) as link:
            link.all_reduce([1.0] * (1 + lane.rank))

    with pytest.raises(PeerDiffers, match=r"link\.all_reduce of 2 numbers while worker 0"):
        run_threads(2, ask)
