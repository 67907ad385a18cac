"""Saving and going on, in threads: same bits, other numbers of workers, and everything that can be wrong."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

import thinwire as tw
from tests.engine.saving import Alone, Half, Job, run, same
from thinwire.engine import dcp, folders
from thinwire.engine.parts import Random
from thinwire.errors import DataError, UsageError


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
    (tmp_path / "step-00000009.saving-00").mkdir()
    (tmp_path / "step-00000009.saving-00" / "worker-0").mkdir()
    (tmp_path / "step-00000001.removing").mkdir()
    assert run(2, Job(folder=tmp_path, until=6))[1].saved is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


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


@pytest.mark.parametrize("part", ["common", "worker-1"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_named_and_left_alone(tmp_path: Path, part: str, harm: str) -> None:
    run(2, Job(folder=tmp_path, until=3, save_at=(2, 3)))
    victim = tmp_path / "step-00000003" / part / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data if harm == "flip" else data[:-9])
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"step-00000003 is damaged: {part}/__0_0.distcp") as caught:
        run(2, Job(folder=tmp_path, until=4, save_at=(4,)))
    assert "to go on from step-00000002" in caught.value.hint
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "manifest.json cannot be read"), ("[]", "cannot be read"), ('{"format": 99}', "has format 99")],
)
def test_a_manifest_that_makes_no_sense(tmp_path: Path, text: str, words: str) -> None:
    run(1, Job(folder=tmp_path, until=1, save_at=(1,)))
    (tmp_path / "step-00000001" / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=words):
        run(1, Job(folder=tmp_path, until=1))


def test_saving_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing begins only when training has long gone on, and still holds the state of step 2."""
    write, trained = dcp.write, threading.Event()

    def late(folder: Path, taken: dict[str, Any]) -> None:
        assert trained.wait(20), "training waits for the disk"
        write(folder, taken)

    monkeypatch.setattr(dcp, "write", late)
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
    write = dcp.write

    def full(folder: Path, taken: dict[str, Any]) -> None:
        if "step-00000002" in str(folder) and "worker-1" in str(folder):
            raise OSError("No space left on device")
        write(folder, taken)

    monkeypatch.setattr(dcp, "write", full)
    with pytest.warns(UserWarning, match="step 2 was not saved") as caught:
        run(2, Job(folder=tmp_path, until=4, save_at=(1, 2, 3)))
    assert {str(each.message).rpartition(": ")[2] for each in caught} == {
        "No space left on device",
        "worker-1 could not write its part",
    }
    assert [path.name for path in folders.whole(tmp_path)] == ["step-00000001", "step-00000003"]


def test_torch_itself_reads_the_weights(tmp_path: Path) -> None:
    trained = run(2, Job(folder=tmp_path, until=2, save_at=(2,)))[0]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    state = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(state, checkpoint_id=tmp_path / "step-00000002" / "common", no_dist=True)
    assert same([p.detach() for p in model.parameters()], trained.weights)


def test_trees_of_all_kinds_come_back(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "nothing": {},
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.0),
        "half": torch.randn(3, 2).bfloat16().t(),
        "flags": torch.tensor([True, False]),
        "tree": (1, [torch.arange(3), None], {0: "a", "0": torch.ones(1)}),
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "array": np.arange(4),
    }
    dcp.write(tmp_path / "part", dcp.snapshot(tree))
    again = dcp.read(tmp_path / "part")
    assert again.keys() == tree.keys()
    assert again["nothing"] == {}
    for name in ("empty", "number", "half", "flags", "a.b"):
        assert torch.equal(again[name], tree[name])
        assert again[name].dtype == tree[name].dtype
    assert again["a"]["b"].item() == 2
    assert again["tree"][0] == 1
    assert again["tree"][1][1] is None
    assert again["tree"][2][0] == "a"
    assert again["tree"][2]["0"].item() == 1
    assert again["array"].tolist() == [0, 1, 2, 3]


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
