"""The account of samples, from journals of made-up workers."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.journals import Writer, read
from thinwire.chaos.samples import account


def two_workers(folder: Path, **facts: object) -> tuple[Writer, Writer]:
    a, b = Writer(folder, 0), Writer(folder, 1)
    for rank, each in enumerate((a, b)):
        each.trains(1, rank, 2, 0, **facts)
    return a, b


def test_every_sample_once_is_right(tmp_path: Path) -> None:
    a, b = two_workers(tmp_path)
    for step in range(2):
        a.step(1, step, [4 * step, 4 * step + 1])
        b.step(1, step, [4 * step + 2, 4 * step + 3])
    a.epoch(1, [])
    found = account(read(tmp_path).workers)
    assert (found.right, found.epochs, found.samples) == (True, 1, 8)


def test_a_sample_that_is_missing_or_doubled_is_told(tmp_path: Path) -> None:
    a, b = two_workers(tmp_path)
    a.step(1, 0, [0, 1, 2, 3])
    b.step(1, 0, [3, 4, 5, 6])
    a.epoch(1, [])
    found = account(read(tmp_path).workers)
    assert (found.doubled, found.missing) == (1, 1)
    assert "never" in " ".join(found.examples)


def test_samples_carried_to_the_next_epoch_are_due_there(tmp_path: Path) -> None:
    a, b = two_workers(tmp_path)
    a.step(1, 0, [0, 1, 2])
    b.step(1, 0, [3, 4, 5, 6])
    a.epoch(1, [7])
    a.step(1, 1, [7, 0, 1, 2], epoch=1)
    b.step(1, 1, [3, 4, 5, 6, 7], epoch=1)
    a.epoch(1, [], epoch=1)
    found = account(read(tmp_path).workers)
    assert (found.right, found.epochs) == (True, 2)


def test_where_replicas_agree_a_step_that_others_finished_counts_and_one_given_up_does_not(
    tmp_path: Path,
) -> None:
    a, b = two_workers(tmp_path)
    a.step(1, 0, [0, 1])
    b.step(1, 0, [2, 3], done=False)  # it died, and its gradient was in
    a.step(1, 1, [4, 5], done=False)  # given up when it was noticed
    a.trains(2, 0, 1, 1)
    a.step(2, 1, [4, 5, 6, 7])
    a.epoch(2, [])
    found = account(read(tmp_path).workers)
    assert (found.right, found.samples) == (True, 8)


def test_where_replicas_differ_what_a_lost_one_did_last_is_done_again(tmp_path: Path) -> None:
    a, b = two_workers(tmp_path, agrees=False)
    a.step(1, 0, [0, 1])
    b.step(1, 0, [2, 3])
    b.step(1, 1, [6, 7])  # of which nobody has heard
    a.trains(2, 0, 1, 1, agrees=False, done=[1, 1])
    a.step(2, 1, [4, 5])
    a.step(2, 2, [6, 7])
    a.epoch(2, [])
    found = account(read(tmp_path).workers)
    assert (found.right, found.again) == (True, 2)


def test_another_lineage_has_an_account_of_its_own(tmp_path: Path) -> None:
    a, b = two_workers(tmp_path)
    for each, lineage in ((a, "run"), (b, "fork")):
        each.trains(2, 0, 1, 0, lineage=lineage)
        each.step(2, 0, list(range(8)))
        each.epoch(2, [])
    assert account(read(tmp_path).workers).samples == 8


def test_a_line_that_a_kill_has_cut_off_is_left_out(tmp_path: Path) -> None:
    a, _ = two_workers(tmp_path)
    with next(tmp_path.glob("host0-*")).open("a") as file:
        file.write('{"at": 1.0, "what": "st')
    journals = read(tmp_path)
    assert [line.what for line in journals.of_host(0)[0].lines] == ["member", "trains"]
    assert a.id in journals.of_host(0)[0].ids
