"""Saving and going on, in threads: same bits, other numbers of workers, and everything that can be wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contract.training import model_and_optimizer
from tests.engine.saving import Alone, Half, Job, run, same
from tests.holding import holder
from tests.worlds import run_threads
from thinwire.engine import folders, tensors
from thinwire.engine.parts import Random
from thinwire.errors import DataError, PeerLost, UsageError
from thinwire.wire.local import LocalLane


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("strategy", [Half(), Alone(), tw.AllReduce(), tw.AllReduce(overlap="forward")])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_goes_on_with_the_same_bits(tmp_path: Path, world_size: int, strategy: Any) -> None:
    whole = run(world_size, Job(folder=tmp_path / "a", until=8, save_at=(3, 5), strategy=strategy))
    first = Job(folder=tmp_path / "b", until=6, save_at=(3, 5), strategy=strategy)
    run(world_size, first)
    resumed = run(world_size, replace(first, until=8))
    for one, other in zip(whole, resumed, strict=True):
        assert other.saved is not None
        assert other.saved.step == 5
        assert same(one.weights, other.weights)
        assert same(one.buffers, other.buffers)
        assert same(one.residuals, other.residuals)
        assert one.loss == other.loss


def test_residuals_are_conserved_in_sum_from_4_to_2_to_3_workers(tmp_path: Path) -> None:
    def total(workers: list[Any]) -> torch.Tensor:
        return torch.stack([torch.cat(each.residuals) for each in workers]).double().sum(0)

    before = run(4, Job(folder=tmp_path, until=4, save_at=(4,)))
    assert total(before).abs().max() > 0
    for world_size in (2, 3):
        after = run(world_size, Job(folder=tmp_path, until=4))
        assert torch.allclose(total(after), total(before), rtol=1e-6, atol=1e-7)
        assert all(same(each.weights, before[0].weights) for each in after)
    before = run(2, Job(folder=tmp_path, until=5, save_at=(5,)))
    after = run(3, Job(folder=tmp_path, until=5))
    assert torch.equal(total(after), total(before))  # nothing to add up: not even rounded
    assert not torch.cat(after[2].residuals).any()
    assert run(3, Job(folder=tmp_path, until=6))[0].saved is not None


def test_from_one_worker_to_several_and_back(tmp_path: Path) -> None:
    alone = run(1, Job(folder=tmp_path, until=3, save_at=(3,)))[0]
    several = run(3, Job(folder=tmp_path, until=3))
    assert same(several[0].residuals, alone.residuals)
    assert all(same(each.weights, alone.weights) for each in several)
    run(3, Job(folder=tmp_path, until=4, save_at=(4,)))
    assert run(1, Job(folder=tmp_path, until=5))[0].saved is not None


def test_replicas_that_differ_go_on_from_their_mean(tmp_path: Path) -> None:
    before = run(3, Job(folder=tmp_path, until=3, save_at=(3,), strategy=Alone()))
    after = run(2, Job(folder=tmp_path, until=3, strategy=Alone()))
    for index, weight in enumerate(after[0].weights):
        mean = torch.stack([each.weights[index] for each in before]).mean(0)
        assert torch.allclose(weight, mean, atol=1e-6)
        assert torch.equal(weight, after[1].weights[index])


def test_keeps_the_last_two_and_sweeps_what_a_kill_left(tmp_path: Path) -> None:
    run(2, Job(folder=tmp_path, until=6, save_at=(1, 2, 3, 4)))
    assert [path.name for path in folders.whole(tmp_path)] == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000009.saving-00112233").mkdir()
    (tmp_path / "step-00000009.saving-00112233" / "worker-0.safetensors").touch()
    (tmp_path / "step-00000001.removing").mkdir()
    (tmp_path / "step-0.probe-00112233").mkdir()
    users = ["step-00000001.backup", "step-00000003.saving-mine", "step-2.old", "step-99999999"]
    for name in users[:-1]:
        (tmp_path / name).mkdir()
    (tmp_path / users[-1]).touch()  # no checkpoint, because it is a file
    assert run(2, Job(folder=tmp_path, until=6))[1].saved is not None
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*users, "step-00000003", "step-00000004"])


def test_starts_at_the_beginning_where_nothing_is_saved(tmp_path: Path) -> None:
    assert run(2, Job(folder=tmp_path / "new" / "folder", until=1))[0].saved is None


def test_refuses_to_save_over_another_run(tmp_path: Path) -> None:
    run(2, Job(folder=tmp_path, until=2, save_at=(2,)))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="already holds step-00000002") as caught:
        run(2, Job(folder=tmp_path, until=2, save_at=(1,), load=False))
    assert "load()" in caught.value.hint
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 9}, r"parameter 0.weight was \(8, 4\) float32, here it is \(9, 4\) float32"),
        ({"strategy": tw.AllReduce()}, r"strategy was Half\(\), here it is AllReduce\(overlap='backward'\)"),
        ({"settings": (("recipe", "b"),)}, "recipe was a, here it is b"),
        ({"settings": ()}, "recipe was a, here it is not there"),
    ],
)
def test_names_what_differs_in_a_foreign_checkpoint(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    job = Job(folder=tmp_path, until=2, save_at=(2,), settings=(("recipe", "a"),))
    run(2, job)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"is of another training: .*{words}"):
        run(2, replace(job, **change))
    assert contents(tmp_path) == before


def test_saving_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing begins only when training has long gone on, and still holds the state of step 2."""
    write, trained = tensors.write, threading.Event()

    def late(path: Path, taken: tensors.TreeSnapshot) -> dict[str, Any]:
        assert trained.wait(500), "training waits for the disk"
        return write(path, taken)

    monkeypatch.setattr(tensors, "write", late)
    step = torch.optim.Adam.step

    def count(self: Any, *args: Any) -> Any:
        result = step(self, *args)
        if next(iter(self.state.values()))["step"] == 6:
            trained.set()
        return result

    monkeypatch.setattr(torch.optim.Adam, "step", count)
    run(1, Job(folder=tmp_path, until=6, save_at=(2,)))
    monkeypatch.undo()
    expected = run(1, Job(folder=tmp_path / "other", until=2))[0]
    resumed = run(1, Job(folder=tmp_path, until=2))[0]
    assert resumed.saved is not None
    assert same(resumed.weights, expected.weights)


def test_a_full_disk_is_a_warning_and_the_next_save_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tensors.write

    def full(path: Path, taken: tensors.TreeSnapshot) -> dict[str, Any]:
        if "step-00000002" in str(path) and "worker-1" in str(path):
            raise OSError("No space left on device")
        return write(path, taken)

    monkeypatch.setattr(tensors, "write", full)
    with pytest.warns(UserWarning, match="step 2 was not saved") as caught:
        run(2, Job(folder=tmp_path, until=4, save_at=(1, 2, 3)))
    assert {str(each.message).rpartition(": ")[2] for each in caught} == {
        "No space left on device",
        "worker-1.safetensors could not be written by its worker",
    }
    assert [path.name for path in folders.whole(tmp_path)] == ["step-00000001", "step-00000003"]


def test_a_worker_is_done_with_the_folder_once_it_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gives the folder its name as soon as the last worker's file is said to be whole."""
    rename, whole = Path.rename, tmp_path / "step-00000002"

    def slow(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        if target.name == "worker-1.safetensors.json":  # which says so
            wait_until(whole.exists)
        return renamed

    monkeypatch.setattr(Path, "rename", slow)
    run(2, Job(folder=tmp_path, until=2, save_at=(2,)))  # a warning is an error
    assert list(tmp_path.iterdir()) == [whole]


def test_a_save_that_rank_0_has_given_up_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tensors.write

    def full(path: Path, taken: tensors.TreeSnapshot) -> dict[str, Any]:
        if path.name == folders.COMMON:
            raise OSError("No space left on device")
        if path.name == folders.worker(1):
            wait_until(lambda: not path.parent.exists())
        return write(path, taken)

    monkeypatch.setattr(tensors, "write", full)
    with pytest.warns(UserWarning, match="step 2 was not saved"):
        run(2, Job(folder=tmp_path, until=2, save_at=(2,)))
    assert list(tmp_path.iterdir()) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("strategy", [Half(), Alone()])
def test_a_plain_model_takes_the_weights(tmp_path: Path, strategy: Any) -> None:
    trained = run(2, Job(folder=tmp_path, until=2, save_at=(2,), strategy=strategy))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.load_state_dict(tw.Checkpoint.read_model(tmp_path))
    means = [torch.stack(each).mean(0) for each in zip(*(worker.weights for worker in trained), strict=True)]
    assert same([p.detach() for p in model.parameters()], means)
    with pytest.raises(DataError, match="there is no checkpoint in"):
        tw.Checkpoint.read_model(tmp_path / "step-00000002")


def test_random_numbers_go_on_and_a_new_worker_has_its_own() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    model = nn.Linear(1, 1)
    keep = Random(model, 0).state_dict()
    try:
        state = Random(model, 0).state_dict()
        expected = draw()
        Random(model, 0).load_state_dict(state)
        assert draw() == expected
        Random(model, 0).resize([state, state])
        assert draw() == expected
        drawn = []
        for rank in (2, 3, 2):
            Random(model, rank).resize([state, state])
            drawn.append(draw())
        assert drawn[0] == drawn[2]
        assert len({*drawn, expected}) == 3
    finally:
        Random(model, 0).load_state_dict(keep)


def test_a_folder_that_another_process_holds_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(2, Job(folder=tmp_path, until=2, save_at=(2,)))
    (tmp_path / "step-00000003.saving-00112233").mkdir()  # which the other one is writing
    with holder(tmp_path) as process:
        with pytest.raises(DataError, match=f"{tmp_path} is in use by process {process.pid} on "):
            run(2, Job(folder=tmp_path, until=4, save_at=(4,)))
        assert (tmp_path / "step-00000003.saving-00112233").exists()
    assert run(2, Job(folder=tmp_path, until=4))[1].saved is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_save_does_not_wait_for_a_worker_that_is_gone(tmp_path: Path) -> None:
    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        link = tw.attach(model, optimizer, tw.AllReduce(), process_group=lane)
        checkpoint = tw.Checkpoint(tmp_path, link=link, model=model, optimizer=optimizer)
        if lane.rank == 0:
            checkpoint.save(1)
            lane.abort(PeerLost("worker 1 is lost", rank=1))
            with pytest.warns(UserWarning, match="worker-1.* was not written: worker 1 is lost"):
                checkpoint.wait()
            checkpoint.close()
        error = PeerLost("worker 1 is lost", rank=1)
        link.__exit__(PeerLost, error, None)

    run_threads(2, work)
