"""Who gets which samples."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire.data import Shards
from thinwire.data.shards import Remainder
from thinwire.errors import SettingError

sizes = st.integers(1, 60)
worlds = st.integers(1, 8)


def everyone(
    num_samples: int, world_size: int, *, remainder: Remainder = "drop", seed: int = 3
) -> list[Shards]:
    return [
        Shards(num_samples=num_samples, rank=rank, world_size=world_size, seed=seed, remainder=remainder)
        for rank in range(world_size)
    ]


@given(num_samples=sizes, world_size=worlds, remainder=st.sampled_from(["drop", "repeat", "uneven"]))
def test_each_sample_once_but_for_the_remainder(
    num_samples: int, world_size: int, remainder: Remainder
) -> None:
    assume(num_samples >= world_size)
    shards = everyone(num_samples, world_size, remainder=remainder)
    parts = [list(each) for each in shards]
    assert [len(part) for part in parts] == [len(each) for each in shards]
    seen = Counter(index for part in parts for index in part)
    extra = num_samples % world_size
    lengths = {len(part) for part in parts}
    if remainder == "drop":
        assert set(seen.values()) == {1}
        assert len(seen) == num_samples - extra
        assert len(lengths) == 1
    elif remainder == "repeat":
        assert len(seen) == num_samples
        assert sum(seen.values()) == num_samples + (-num_samples % world_size)
        assert len(lengths) == 1
    else:
        assert seen == Counter(range(num_samples))
        assert max(lengths) - min(lengths) <= 1


@given(
    num_samples=st.integers(30, 80),
    stages=st.lists(st.tuples(worlds, st.integers(0, 4)), min_size=1, max_size=3),
    last=worlds,
    batch_size=st.integers(1, 4),
)
def test_resuming_with_another_world_size_repeats_and_loses_nothing(
    num_samples: int, stages: list[tuple[int, int]], last: int, batch_size: int
) -> None:
    assume(sum(world_size * num_batches * batch_size for world_size, num_batches in stages) <= num_samples)
    seen: Counter[int] = Counter()
    state = {"seed": 5, "epoch": 2, "position": 0}
    for world_size, num_batches in stages:
        shards = everyone(num_samples, world_size)
        for each in shards:
            each.load_state_dict(state)
            for batch in islice(each.batches(batch_size), num_batches):
                seen.update(batch.tolist())
            each.set_epoch(2, position=state["position"])
            each.advance(num_batches * batch_size)
        state = shards[0].state_dict()
    for each in everyone(num_samples, last, remainder="uneven"):
        each.load_state_dict(state)
        seen.update(each)
    assert seen == Counter(range(num_samples))


def test_a_global_batch_is_the_same_whatever_the_number_of_workers() -> None:
    for world_size in (1, 2, 4):
        first = [next(each.batches(8 // world_size)) for each in everyone(64, world_size)]
        assert sorted(int(i) for batch in first for i in batch) == sorted(
            next(everyone(64, 1)[0].batches(8)).tolist()
        )


def test_position_counts_all_workers_samples_as_they_are_handed_out() -> None:
    shards = everyone(20, 2)[1]
    batches = shards.batches(4)
    assert shards.position == 0
    next(batches)
    assert shards.position == 8
    assert shards.num_batches(4) == 2
    list(batches)
    assert shards.position == 20
    assert len(shards) == 0


def test_epochs_and_seeds_differ_and_repeat() -> None:
    shards = everyone(50, 2)[0]
    first = list(shards)
    shards.set_epoch(1)
    assert list(shards) != first
    shards.set_epoch(0)
    assert list(shards) == first
    assert list(everyone(50, 2, seed=4)[0]) != first


def test_unshuffled_is_in_order() -> None:
    assert list(Shards(num_samples=6, rank=1, world_size=2, shuffle=False)) == [1, 3, 5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
        ({"world_size": 11}, "world_size must be at most 10"),
        ({"remainder": "lose"}, "remainder must be one of 'drop', 'repeat', 'uneven', got 'lose'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Shards(num_samples=10, **settings)  # type: ignore[arg-type]
