"""An elastic world from one worker's point of view, in one process: failures at its start and its changes."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.wire.tls import in_threads
from tests.worlds import has_ipv6
from thinwire.elastic import world as elastic_world
from thinwire.elastic.keys import write_key
from thinwire.elastic.world import Elastic, World
from thinwire.errors import PeerLate, PeerLost
from thinwire.wire.connect import connect_members

TIMEOUT_S = 6.0


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(Elastic(), timeout_s=TIMEOUT_S, silence_s=3.0)
    world.connect()
    yield world
    world.close()


def late(times: int) -> Any:
    """Connecting, where somebody does not come the first times."""
    left = [times]

    def connect(*args: Any, **settings: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise PeerLate("worker 1 has not opened a door", rank=1)
        return connect_members(*args, **settings)

    return connect


def test_one_that_does_not_come_to_a_meeting_does_not_end_those_who_train(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be frozen for less than silence_s, or new and behind a firewall: they meet again."""
    monkeypatch.setattr(elastic_world, "connect_members", late(2))
    alone.drop(PeerLost("the workers have changed"))
    assert alone.connect().world_size == 1
    assert alone.generation == 4


def test_meetings_that_never_come_about_are_an_error_in_the_end(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_world, "connect_members", late(1000))
    alone.drop(PeerLost("the workers have changed"))
    began_s = time.monotonic()
    with pytest.raises(PeerLate, match="has not opened a door"):
        alone.connect()
    assert time.monotonic() - began_s > TIMEOUT_S / 2


def test_a_worker_that_has_not_trained_yet_says_at_once_whom_it_cannot_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic_world, "connect_members", late(1000))
    world = World(Elastic(), timeout_s=1000, silence_s=3.0)
    with pytest.raises(PeerLate, match="has not opened a door"):
        world.connect()
    world.leave()


def test_who_cannot_join_leaves_nothing_behind(tmp_path: Path) -> None:
    """Else it would be a member that lives, and never trains."""
    write_key(tmp_path / "run.key")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gc.collect()  # what earlier tests have left to it
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = Elastic(join=[f"127.0.0.1:{port}"], key_file=str(tmp_path / "run.key"))
    with pytest.raises(PeerLost, match="nobody who would let this worker join"):
        tw.attach(model, optimizer, tw.AllReduce(), elastic=elastic, silence_s=1.0)
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_loss_after_the_optimizer_has_stepped_does_not_deal_the_batch_again() -> None:
    """As in a sum over all workers, inside the step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained: list[int] = []
    with tw.attach(model, optimizer, tw.AllReduce(), elastic=True) as link:
        sampler = link.sampler(6, batch_size=2)
        for _ in link.epochs(1):
            for step in link.each_step(sampler):
                with step as batch:
                    model(torch.ones(len(batch), 1)).sum().backward()
                    optimizer.step()
                    trained += batch
                    if link.stats.steps == 2 and link.generation == 1:
                        raise PeerLost("worker 1 is lost")
                assert step.done
        assert link.generation == 2
    assert sorted(trained) == list(range(6))


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_a_world_may_be_on_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_key(tmp_path / "run.key")
    monkeypatch.setattr(elastic_world, "_route_to", lambda addresses: "::1")
    settings = Elastic(key_file=str(tmp_path / "run.key"))
    first = World(settings, timeout_s=20, silence_s=3.0)
    assert first.me.host == "::1"
    first.connect()
    new = World(replace(settings, join=[f"[::1]:{first.me.port}"]), timeout_s=20, silence_s=3.0)
    deadline = time.monotonic() + 20
    while len(first._peers.roster.reachable) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.drop(PeerLost("somebody joins"))
    lanes = in_threads(lambda rank: (first, new)[rank].connect(), 2)
    assert [lane.world_size for lane in lanes] == [2, 2]
    in_threads(lambda rank: (first, new)[rank].close(), 2)
