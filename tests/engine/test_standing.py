"""What follows from where each worker is when the workers have changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.engine.standing import Standing, batches_done, check_joiners, giver_of
from thinwire.errors import PeerDiffers, PeerLost

FIRST = Standing(
    id="a",
    new=False,
    synced=1,
    rank=0,
    steps=10,
    epoch=0,
    taken=4,
    known=[10, 9, 8],
    since=6,
    shared="same",
    alike="model",
    calls=0,
    averaged=False,
    mixed=False,
)
JOINER = replace(FIRST, id="new", new=True, synced=0, steps=99)


def test_who_has_come_furthest_gives_and_never_who_joins() -> None:
    late = replace(FIRST, id="b", rank=1, steps=9)
    assert giver_of([JOINER, late, FIRST]) is FIRST
    newer = replace(late, synced=2)
    assert giver_of([FIRST, newer]) is newer


def test_who_joins_or_has_missed_something_takes_over() -> None:
    assert JOINER.is_behind(FIRST, agree=False)
    assert replace(FIRST, shared="other").is_behind(FIRST, agree=False)
    assert not replace(FIRST, steps=9).is_behind(FIRST, agree=False)
    assert replace(FIRST, steps=9).is_behind(FIRST, agree=True)
    assert replace(FIRST, calls=0).is_behind(replace(FIRST, calls=1, averaged=True), agree=False)
    assert not replace(FIRST, calls=0).is_behind(replace(FIRST, calls=1), agree=False)


def test_a_step_that_others_made_with_ones_gradient_is_completed_and_that_of_a_left_out_one_is_not() -> None:
    late = replace(FIRST, id="b", rank=1, steps=9, taken=3)
    assert late.is_completed_by(FIRST, agree=True)
    assert not late.is_completed_by(FIRST, agree=False), "it makes the step itself, with its own model"
    assert not replace(late, steps=10).is_completed_by(FIRST, agree=True), "the step is made again by all"
    assert late.is_completed_by(replace(FIRST, synced=2, since=10, taken=0), agree=True)
    assert not replace(late, new=True).is_completed_by(FIRST, agree=True)
    assert not JOINER.is_completed_by(FIRST, agree=True)


def test_a_joiner_with_another_model_leaves_and_the_others_begin_again() -> None:
    stranger = replace(JOINER, alike="another model")
    check_joiners([FIRST, JOINER], "new")
    with pytest.raises(PeerDiffers, match="another model or other settings"):
        check_joiners([FIRST, stranger], "new")
    with pytest.raises(PeerLost, match="new has another model or other settings, and must leave"):
        check_joiners([FIRST, stranger], "a")


def test_batches_of_workers_that_are_lost_count_as_far_as_somebody_knows() -> None:
    second = replace(FIRST, id="b", rank=1, steps=9, taken=3, known=[9, 9, 9])
    assert batches_done([FIRST, second, JOINER], FIRST, agree=False) == [4, 3, 3]
    assert batches_done([FIRST, second, JOINER], FIRST, agree=True) == [4, 4, 4]
    behind = replace(second, epoch=-1)
    assert batches_done([FIRST, behind], FIRST, agree=False) == [4, 0, 3]
