"""Apoptosis in worker processes over Gloo: the same bits on all, and a worker that dies during an event."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import thinwire as tw
from tests.apoptosis.training import parts, step_once, train
from tests.worlds import Processes, run_processes
from thinwire.apoptosis import agreement
from thinwire.engine.checkpoint import Checkpoint

pytestmark = pytest.mark.processes


def test_processes_shrink_alike_and_as_threads_do() -> None:
    first, second = run_processes(2, train, tw.AllReduce())
    assert first.shapes == second.shapes
    assert first.events[0].removed > 0
    assert all(map(torch.equal, first.weights, second.weights))


def _dies_in_an_event(folder: str) -> list[tuple[int, ...]]:
    model, optimizer = parts()
    tw.apoptosis.rebuild(model, folder)
    settings = tw.Apoptosis(mode="aggressive", every=6, start=6, budget=0.1)
    if "DIES" in os.environ and os.environ["DIES"] == str(torch.distributed.get_rank()):

        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(agreement, "measure", die)  # noqa: B010  # dies where an event begins
    with (
        tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link,
        tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
    ):
        saved = checkpoint.load()
        for step in range(saved.step if saved else 0, 8):
            step_once(link, model, optimizer, step)
            if step == 3:
                checkpoint.save(4)
                checkpoint.wait()
                link.all_reduce([0.0])
        return [tuple(p.shape) for p in model.parameters()]


def test_a_worker_killed_in_an_event_does_no_damage(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    monkeypatch.setenv("DIES", "1")
    processes = Processes(2, _dies_in_an_event, folder)
    try:
        well, told = processes.outcome(0, 60)
    finally:
        processes.kill()
    assert not well
    assert "PeerLost" in told
    assert Checkpoint.read_model(folder)["0.weight"].shape == (48, 8), "the last good state"
    monkeypatch.delenv("DIES")
    first, second = run_processes(2, _dies_in_an_event, folder)
    assert first == second
    assert first[0][0] < 48
