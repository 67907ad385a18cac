"""A worker that dies, freezes, raises, leaves early or sleeps: everyone else is told who and why."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import Processes

pytestmark = pytest.mark.processes
STOPPED_WITHIN_S = 15


@dataclass(frozen=True)
class Fault:
    kind: str
    worker: int
    step: int


def train_until(fault: Fault, timeout_s: float, moment: Path) -> None:
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, tw.AllReduce(), timeout_s=timeout_s) as link:
        for step in range(10_000):
            if (link.rank, step) == (fault.worker, fault.step):
                time.sleep(1.5)  # three beats: peers have read how far this worker is
                moment.write_text(str(time.time()))
                if fault.kind == "leave":
                    return
                commit(fault)
            step_once(model, optimizer, step, link.rank)


def commit(fault: Fault) -> None:
    if fault.kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault.kind))
    elif fault.kind == "raise":
        raise ArithmeticError("the batch was bad")
    elif fault.kind == "sleep":
        time.sleep(60)


def survivors(fault: Fault, moment: Path, *, timeout_s: float) -> list[str]:
    """The errors of the other three workers, who must all have stopped in time after the fault."""
    processes = Processes(4, train_until, fault, timeout_s, moment)
    try:
        outcomes = [processes.outcome(rank, 100) for rank in range(4) if rank != fault.worker]
        stopped_s = time.time() - float(moment.read_text())
    finally:
        processes.kill()
    assert stopped_s < STOPPED_WITHIN_S
    assert not any(well for well, _ in outcomes)
    return [str(error) for _, error in outcomes]


@pytest.mark.parametrize(
    ("kind", "timeout_s", "error", "cause"),
    [
        ("SIGKILL", 60.0, "PeerLost", "is lost at step 20: its connections broke"),
        ("SIGSTOP", 60.0, "PeerLost", "is lost at step 20: no sign of life for 10 s"),
        ("raise", 60.0, "PeerLost", "left at step 20 with ArithmeticError: the batch was bad"),
        ("sleep", 5.0, "PeerLate", "is alive, at step 20;"),
        ("leave", 5.0, "PeerLate", "is alive, at step 20, detaching"),
    ],
)
def test_everyone_stops_and_knows_why(
    kind: str, timeout_s: float, error: str, cause: str, tmp_path: Path
) -> None:
    for message in survivors(Fault(kind, worker=2, step=20), tmp_path / "moment", timeout_s=timeout_s):
        assert message.startswith(f"{error}: ")
        assert "worker 2 on " in message
        assert cause in message
        assert "hint: " in message
