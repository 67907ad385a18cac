"""A worker that dies, freezes, raises, leaves early or sleeps: everyone else is told who and why."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import Processes, run_threads
from thinwire.errors import PeerLost
from thinwire.strategies.base import Strategy
from thinwire.wire import watch
from thinwire.wire.local import LocalLane

pytestmark = pytest.mark.processes
NEVER_S = 600.0
"""A time-out for operations that no test waits for: whoever stops has been told, or has noticed."""
BEAT_S, SILENCE_S = 0.1, 3.0
"""In place of 0.5 and 10 s. The silence counts only where a worker is stopped, which is then silent for
longest: on a busy machine a healthy one may be late too."""


@dataclass(frozen=True)
class Fault:
    kind: str
    worker: int
    step: int


def train_until(fault: Fault, timeout_s: float) -> None:
    watch.BEAT_S, watch._NOTICE_S = BEAT_S, 4 * BEAT_S
    model, optimizer = model_and_optimizer()
    silence_s = SILENCE_S if fault.kind == "SIGSTOP" else NEVER_S
    with tw.attach(model, optimizer, tw.AllReduce(), timeout_s=NEVER_S, silence_s=silence_s) as link:
        link._runtime.transport.timeout_s = timeout_s  # and not the time to attach
        for step in range(10_000):
            if (link.rank, step) == (fault.worker, fault.step):
                time.sleep(10 * BEAT_S)  # until peers have read how far this worker is
                if fault.kind == "leave":
                    return
                if fault.kind == "call":
                    link.all_reduce([1.0])  # which nobody else does
                if fault.kind == "finally":
                    fail_and_detach(link)
                commit(fault)
            step_once(model, optimizer, step, link.rank)


def fail_and_detach(link: tw.Link) -> None:
    try:
        raise ArithmeticError("the batch was bad")
    finally:
        link.detach()


def commit(fault: Fault) -> None:
    if fault.kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault.kind))
    elif fault.kind == "raise":
        raise ArithmeticError("the batch was bad")
    elif fault.kind == "sleep":
        time.sleep(NEVER_S)


def survivors(fault: Fault, *, timeout_s: float) -> list[str]:
    """The errors of the other three workers, who must all stop after the fault."""
    processes = Processes(4, train_until, fault, timeout_s)
    try:
        outcomes = [processes.outcome(rank, 100) for rank in range(4) if rank != fault.worker]
    finally:
        processes.kill()
    assert not any(well for well, _ in outcomes)
    return [str(error) for _, error in outcomes]


@pytest.mark.parametrize(
    ("kind", "timeout_s", "error", "cause"),
    [
        ("SIGKILL", NEVER_S, "PeerLost", "is lost at step 20: its connections broke"),
        ("SIGSTOP", NEVER_S, "PeerLost", "is lost at step 20: no sign of life for 3 s"),
        ("raise", NEVER_S, "PeerLost", "left at step 20 with ArithmeticError: the batch was bad"),
        ("sleep", 5.0, "PeerLate", "is alive, at step 20;"),
        ("leave", NEVER_S, "PeerLost", "leaves after 20 steps, this one is at step 21"),
        ("finally", NEVER_S, "PeerLost", "left at step 20 with ArithmeticError: the batch was bad"),
        ("call", NEVER_S, "PeerDiffers", "is in link.all_reduce of 1 numbers at step 20, and worker"),
    ],
)
def test_everyone_stops_and_knows_why(kind: str, timeout_s: float, error: str, cause: str) -> None:
    for message in survivors(Fault(kind, worker=2, step=20), timeout_s=timeout_s):
        assert message.startswith(f"{error}: ")
        assert "worker 2 on " in message
        assert cause in message
        assert "hint: " in message


def train_with_fewer_steps(strategy: Strategy) -> None:
    watch.BEAT_S = BEAT_S
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, strategy, timeout_s=NEVER_S, silence_s=NEVER_S) as link:
        for step in range(6 - (link.rank == 1)):
            step_once(model, optimizer, step, link.rank)


@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.AllReduce(overlap="forward")], ids=repr)
def test_one_step_fewer_is_named_where_all_come_to_detach(strategy: Strategy) -> None:
    processes = Processes(3, train_with_fewer_steps, strategy)
    try:
        outcomes = [processes.outcome(rank, 100) for rank in range(3)]
    finally:
        processes.kill()
    for well, message in outcomes:
        assert not well
        assert "PeerLost: worker 1 on " in message
        assert "leaves after 5 steps, this one after 6" in message


def test_who_waits_for_nobody_stops_too() -> None:
    def work(lane: LocalLane) -> str:
        model, optimizer = model_and_optimizer()
        link = tw.attach(model, optimizer, tw.Silent(), process_group=lane)
        step_once(model, optimizer, 0, lane.rank)
        link.all_reduce([0.0])  # both have made that step
        if lane.rank == 1:
            lane.abort(PeerLost("worker 1 is lost", rank=1))
        else:
            while lane.lost is None:
                time.sleep(0.01)
        with pytest.raises(PeerLost) as raised:
            step_once(model, optimizer, 1, lane.rank)
        link.__exit__(PeerLost, raised.value, None)
        return raised.value.message

    assert run_threads(2, work) == ["worker 1 is lost"] * 2
