"""How scripts end, as real processes: their exit codes are their own, whatever has happened to others."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import exit_codes
from thinwire.engine.link import Link
from thinwire.errors import PeerError, PeerLate, PeerLost
from thinwire.wire import backend, watch

pytestmark = pytest.mark.processes
STEP = 5


def train(strategy: str, num_steps: int = STEP) -> Link:
    watch.BEAT_S = 0.1
    model, optimizer = model_and_optimizer()
    link = tw.attach(model, optimizer, getattr(tw, strategy)())
    for step in range(num_steps):
        step_once(model, optimizer, step, link.rank)
    return link


def end_without_detach(strategy: str) -> None:
    kept.append(train(strategy))


kept: list[Link] = []
"""A script's own names live until the interpreter ends."""


@pytest.mark.parametrize("strategy", ["AllReduce", "GossipGraD", "StochasticGradientPush"])
def test_a_script_without_detach_ends_well(strategy: str) -> None:
    assert exit_codes(2, end_without_detach, strategy) == [0, 0]


def detach_in_finally() -> None:
    link = train("AllReduce")
    try:
        if link.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        link.all_reduce([1.0])
    except PeerError:
        sys.exit(7)
    finally:
        link.detach()


def test_the_exit_code_is_kept_when_a_peer_was_killed() -> None:
    assert exit_codes(3, detach_in_finally) == [7, -signal.SIGKILL, 7]


def exit_in_one_worker() -> None:
    if dist.get_rank() == 1:
        kept.append(train("AllReduce"))
        sys.exit(3)
    train("AllReduce", num_steps=10_000)


def test_who_exits_with_a_code_keeps_it_and_others_fail() -> None:
    assert exit_codes(3, exit_in_one_worker) == [1, 3, 1]


def block_while_connecting() -> None:
    """As a lane does whose peer is cut off, which nothing can end."""
    link = train("AllReduce")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"trained/{link.rank}", "")
    store.wait(["trained/0", "trained/1"])  # else the other's last step may be the one that fails
    try:
        if link.rank == 0:
            backend._COME_BACK_S = 0.1
            backend.Pool._connect = lambda *_: time.sleep(1000)  # type: ignore[assignment, method-assign]
            link._core.lane.lane("another").collective("all_reduce", torch.zeros(1), torch.zeros(1))
            raise PeerLost("worker 1 is lost", rank=1)
        link.all_reduce([1.0])
    except PeerLost as error:
        link._core.lane.abort(error)
        link.__exit__(type(error), error, None)
        sys.exit(5)


def test_who_is_blocked_in_a_backend_for_good_ends_with_its_code() -> None:
    assert exit_codes(2, block_while_connecting) == [5, 5]


def die_before_attach() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"started/{dist.get_rank()}", "")
    if dist.get_rank() == 1:
        store.wait(["started/0", "started/2"])  # a death in the start of the group is torch's business
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train("AllReduce")
    except PeerError as error:
        told = "worker 1 has ended after the process group was started" in error.message
        sys.exit(11 if told and error.rank == 1 else 9)


def test_a_death_before_attach_is_noticed_by_all() -> None:
    assert exit_codes(3, die_before_attach) == [11, -signal.SIGKILL, 11]


def attach_after_others_have_ended() -> None:
    """Worker 1 dies, worker 0 ends because of that; worker 2 comes last and finds both connections broken."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    store.set(f"pid/{rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["pid/0", "pid/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        while is_running(int(store.get("pid/0"))):
            time.sleep(0.02)
    try:
        train("AllReduce")
    except PeerLost as error:
        sys.exit(11 if error.rank == 1 else 9)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_who_comes_after_others_have_ended_names_the_one_who_died_first() -> None:
    assert exit_codes(3, attach_after_others_have_ended) == [11, -signal.SIGKILL, 11]


def do_not_come_to_attach() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["over"])
        return
    model, optimizer = model_and_optimizer()
    try:
        tw.attach(model, optimizer, tw.AllReduce(), timeout_s=1)
    except PeerLate as error:
        store.set("over", "")
        sys.exit(11 if error.rank == 1 else 9)


def test_who_does_not_attach_in_time_is_named() -> None:
    assert exit_codes(2, do_not_come_to_attach) == [11, 0]
