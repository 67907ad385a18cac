"""Damaged, foreign and crafted checkpoints: an error that names the file, no code run, nothing lost."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.engine.saving import Job, run
from tests.odd import mutate
from tests.worlds import run_threads
from thinwire.engine import folders
from thinwire.errors import DataError, UsageError
from thinwire.wire.base import Lane

NUM_DAMAGES = 100
NUM_CRAFTED = 100
STEP = "step-00000003"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of two workers, not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    run(2, Job(folder=folder, until=3, save_at=(2, 3)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read(path: Path) -> dict[str, Any]:
    """All that is in a checkpoint, as `Checkpoint` reads it."""
    manifest = folders.read_manifest(path)
    return {name: folders.read_part(path, manifest, name, ()) for name in manifest.files}


def sign(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a right digest, as an attacker would."""
    content.pop("sha256", None)
    (path / "manifest.json").write_bytes(folders._as_text(content))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# -- accidents --------------------------------------------------------------------------------------


def cut(victim: Path, dice: random.Random, other: Path) -> None:
    data = victim.read_bytes()
    victim.write_bytes(data[: dice.randrange(len(data))])


def flip(victim: Path, dice: random.Random, other: Path) -> None:
    data = bytearray(victim.read_bytes())
    for _ in range(dice.choice((1, 1, 3))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    victim.write_bytes(data)


def lengthen(victim: Path, dice: random.Random, other: Path) -> None:
    with victim.open("ab") as file:
        file.write(dice.randbytes(dice.randrange(1, 99)))


def remove(victim: Path, dice: random.Random, other: Path) -> None:
    victim.unlink()


def swap(victim: Path, dice: random.Random, other: Path) -> None:
    """With another file of this checkpoint, or the same file of an older one."""
    theirs = other if dice.random() < 0.5 else victim.parents[1] / "step-00000002" / victim.name
    data = victim.read_bytes()
    victim.write_bytes(theirs.read_bytes())
    theirs.write_bytes(data)


def pickled(victim: Path, dice: random.Random, other: Path) -> None:
    trap = Trap(victim.parents[2] / "trap")
    if dice.random() < 0.5:
        victim.write_bytes(pickle.dumps(trap))
    else:
        torch.save({"model": trap}, victim)


def no_file(victim: Path, dice: random.Random, other: Path) -> None:
    victim.unlink()
    dice.choice((os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)))(victim)


DAMAGES: list[Callable[[Path, random.Random, Path], None]] = [
    cut, flip, lengthen, remove, swap, pickled, no_file,
]  # fmt: skip


def test_no_damage_runs_code_or_gives_wrong_numbers(saved: Path, tmp_path: Path) -> None:
    dice = random.Random(3)
    original = read(saved / STEP)
    for number in range(NUM_DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        names = sorted(path.name for path in (folder / STEP).iterdir())
        assert len(names) == 4
        victim, other = dice.sample(names, 2)
        damage = DAMAGES[number % len(DAMAGES)]
        damage(folder / STEP / victim, dice, folder / STEP / other)
        with pytest.raises(DataError, match=f"{STEP}|is of another training") as caught:
            read(folder / STEP)
        words = caught.value.message
        assert any(name in words for name in names), (damage, words)
        if damage is not swap:
            assert victim in words, (damage, words)
            assert "step-00000002" in caught.value.hint or "version" in caught.value.hint
        assert not (tmp_path / "trap").exists()
        shutil.rmtree(folder)
    assert equal(read(saved / STEP), original)


@pytest.mark.parametrize("name", ["common.safetensors", "worker-1.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, remove, pickled])
def test_damage_is_told_by_all_workers_and_left_alone(
    saved: Path, tmp_path: Path, name: str, damage: Callable[..., None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    damage(folder / STEP / name, random.Random(1), folder)
    before = contents(folder)
    with pytest.raises(DataError, match=rf"{STEP} is damaged: {name} ") as caught:
        run(2, Job(folder=folder, until=4, save_at=(4,)))
    assert (
        caught.value.hint == f"rename that folder, for example to {STEP}.damaged, to go on from step-00000002"
    )
    assert contents(folder) == before
    assert not (tmp_path / "trap").exists()
    (folder / STEP).rename(folder / f"{STEP}.damaged")
    [first, _] = run(2, Job(folder=folder, until=4, save_at=(4,)))
    assert first.saved is not None
    assert first.saved.step == 2
    assert (folder / f"{STEP}.damaged").exists()


def test_only_a_checkpoint_that_has_all_its_files_is_offered(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    for step in (STEP, "step-00000002"):
        (tmp_path / "run" / step / "worker-0.safetensors").unlink()
    with pytest.raises(DataError, match=r"worker-0.safetensors is missing") as caught:
        read(tmp_path / "run" / STEP)
    assert caught.value.hint.endswith("to start again")


def test_a_checkpoint_that_could_not_be_read_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / STEP / "common.safetensors").unlink()

    def worker(lane: Lane) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            tw.attach(model, optimizer, tw.AllReduce(), process_group=lane) as link,
            tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
        ):
            with pytest.raises(DataError):
                checkpoint.load()
            with pytest.raises(UsageError, match="already holds"):
                checkpoint.save(1)

    run_threads(1, worker)


# -- attacks ------------------------------------------------------------------------------------------


def craft(path: Path, dice: random.Random) -> None:
    """Change the manifest, or the header or tree of a file, and make all digests right again."""
    content = json.loads((path / "manifest.json").read_text())
    content.pop("sha256")
    if dice.random() < 0.4:
        changed = mutate(content, dice)
        sign(path, {**changed, "format": 2} if isinstance(changed, dict) and changed else content)
        return
    name = dice.choice(list(content["files"]))
    data = (path / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if dice.random() < 0.5:
        tree = mutate(json.loads(header["__metadata__"]["tree"]), dice)
        header["__metadata__"]["tree"] = json.dumps(tree)
    else:
        header = mutate(header, dice)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (path / name).write_bytes(data)
    content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sign(path, content)


def test_a_crafted_checkpoint_is_read_or_refused(saved: Path, tmp_path: Path) -> None:
    dice = random.Random(4)
    refused = 0
    for number in range(NUM_CRAFTED):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        craft(folder / STEP, dice)
        try:
            read(folder / STEP)
        except DataError:
            refused += 1
        shutil.rmtree(folder)
    assert refused > NUM_CRAFTED / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"world_size": 10**9},
            "world_size must be 1 or more, and one less than its 3 files, got 1000000000",
        ),
        ({"world_size": 0}, "world_size must be"),
        ({"world_size": True}, "world_size must be"),
        ({"step": 4}, "step must be that of its folder, got 4"),
        ({"about": {"seed": 1}}, "about must be text by name"),
        (
            {"files": {"a": 1, "b": 2, "c": 3}},
            "files\\['common.safetensors'\\] must be its size in bytes and its sha256",
        ),
        ({"files": None}, "files must be facts by name, got None"),
    ],
)
def test_wrong_fields_of_a_manifest_are_named(
    saved: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    shutil.copytree(saved / STEP, tmp_path / STEP)
    sign(tmp_path / STEP, {**json.loads((tmp_path / STEP / "manifest.json").read_text()), **change})
    tracemalloc.start()
    with pytest.raises(DataError, match=f"manifest.json has a wrong field: {words}"):
        read(tmp_path / STEP)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1e6, "a number in it takes memory"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "manifest.json cannot be understood"),
        ("[" * 100_000, "manifest.json cannot be understood"),
        ("[]", "manifest.json cannot be understood"),
        ('{"format": 2}', "manifest.json is not as it was written"),
        ('{"format": 99}', "manifest.json has format 99, and this version of thinwire reads format 2"),
    ],
)
def test_a_manifest_that_makes_no_sense(saved: Path, tmp_path: Path, text: str, words: str) -> None:
    shutil.copytree(saved / STEP, tmp_path / STEP)
    (tmp_path / STEP / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read(tmp_path / STEP)


def test_states_that_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    """With right digests: what a part makes of it is an error of ours, on all workers."""
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / STEP
    content = json.loads((path / "manifest.json").read_text())
    content["files"]["common.safetensors"] = content["files"]["worker-0.safetensors"]
    shutil.copy(path / "worker-0.safetensors", path / "common.safetensors")
    sign(path, content)
    with pytest.raises(
        DataError, match=r"common\.safetensors does not hold model, optimizer, schedule, shards"
    ):
        run(2, Job(folder=tmp_path / "run", until=3))
