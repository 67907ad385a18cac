"""Folders with anything wrong in them: a page that says what was left out, or one error."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.odd import mutate
from tests.report.made import make_bench, make_run
from thinwire.errors import DataError
from thinwire.report.findings import notices, verdict
from thinwire.report.page import page, write_report
from thinwire.report.subject import read_subject

NUM_DAMAGES = 100


def hurt(victim: Path, dice: random.Random) -> None:
    """One accident, or one odd value, in a file."""
    data = victim.read_bytes()
    match dice.randrange(8):
        case 0:
            victim.write_bytes(data[: dice.randrange(len(data))])
        case 1:
            at = dice.randrange(len(data))
            victim.write_bytes(data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :])
        case 2:
            victim.unlink()
            dice.choice((os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)))(victim)
        case _ if victim.suffix == ".json":
            victim.write_text(json.dumps(mutate(json.loads(data), dice)))
        case _:
            lines = data.decode().splitlines()
            for at in {0, len(lines) - 1, dice.randrange(len(lines))}:
                record = json.loads(lines[at])
                field = dice.choice(list(record))
                lines[at] = json.dumps({**record, field: mutate(record[field], dice)})
            victim.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(folder / "one")
    make_run(folder / "failed", steps=30, end="badly")
    make_run(folder / "two" / "a", strategy="gtopk", settings={"density": 0.1}, more={"clock": "virtual"})
    make_run(folder / "two" / "b")
    bench = make_bench(folder / "bench", workers=(2,), rates=(50e6,), turns=1)
    (bench / "time_to_accuracy.json").write_text('[{"recipe": "digits-cnn", "target": 0.25}]')
    return folder


def test_no_damage_ends_in_a_traceback_or_a_wait(made: Path, tmp_path: Path) -> None:
    dice = random.Random(5)
    told = 0
    for number in range(NUM_DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(made / dice.choice(("one", "failed", "two", "bench")), folder)
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl"))
        for victim in dice.sample(files, dice.randint(1, 2)):
            hurt(victim, dice)
        try:
            subject = read_subject(folder)
            assert verdict(subject)
            page(subject, []).encode()
            told += any("could not be read" in words for words in notices(subject))
        except DataError:
            told += 1
        shutil.rmtree(folder)
    assert told > NUM_DAMAGES / 4


def test_damage_is_named_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lines = (folder / "events" / "worker-1.jsonl").read_text().splitlines()
    lines[2] = lines[2].replace('"step": 10', '"step": "ten"')
    (folder / "events" / "worker-1.jsonl").write_text("\n".join(lines) + "\n")
    os.mkfifo(folder / "events" / "worker-2.jsonl")
    [words] = write_report(folder).notices
    assert words.startswith(
        "2 lines of events could not be read (worker-1.jsonl line 3, worker-2.jsonl (it is"
    )
