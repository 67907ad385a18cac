"""Rows of text that go on from batch to batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.data import Streams
from thinwire.errors import SettingError


def worlds(num_samples: int, world_size: int) -> list[Streams]:
    return [Streams(num_samples=num_samples, rank=rank, world_size=world_size) for rank in range(world_size)]


def read(streams: list[Streams], batch_size: int, num_batches: int | None = None) -> list[list[int]]:
    """The rows of the next global batches, put together from all workers."""
    rows = []
    iterators = [each.batches(batch_size) for each in streams]
    for parts in zip(*iterators, strict=True):
        rows.append(np.concatenate(parts).tolist())
        if len(rows) == num_batches:
            break
    return rows


@given(st.integers(12, 200), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)]))
def test_each_row_goes_on_and_depends_on_the_global_batch_alone(
    num_samples: int, shape: tuple[int, int]
) -> None:
    world_size, batch_size = shape
    streams = worlds(num_samples, world_size)
    batches = read(streams, batch_size)
    assert batches == read(worlds(num_samples, 1), 12)
    assert len(batches) == num_samples // 12
    for before, after in pairwise(batches):
        assert [index + 1 for index in before] == after
    used = [index for batch in batches for index in batch]
    assert len(set(used)) == len(used) == num_samples // 12 * 12


@given(st.integers(24, 200), st.integers(0, 5), st.sampled_from([(1, 12), (2, 3), (3, 2), (4, 2)]))
def test_saved_and_loaded_nothing_is_read_twice(
    num_samples: int, num_batches: int, shape: tuple[int, int]
) -> None:
    world_size, batch_size = shape
    first = worlds(num_samples, 2)
    used = read(first, 6, num_batches) if num_batches else []
    saved = first[0].state_dict()
    assert all(each.state_dict() == saved for each in first)
    then = worlds(num_samples, world_size)
    for each in then:
        each.load_state_dict(saved)
    left = then[0].num_batches(batch_size)
    rest = read(then, batch_size)
    assert len(rest) == left
    seen = [index for batch in used + rest for index in batch]
    assert len(set(seen)) == len(seen)
    rows = world_size * batch_size
    assert len(seen) > num_samples // 12 * 12 - rows  # less than one sample a row is lost
    if rows == 12:
        assert used + rest == read(worlds(num_samples, 2), 6)


def test_a_change_in_the_middle_survives_another_save() -> None:
    first = worlds(100, 1)
    used = read(first, 10, 3)
    second = worlds(100, 2)
    for each in second:
        each.load_state_dict(first[0].state_dict())
    used += read(second, 3, 4)
    third = worlds(100, 1)[0]
    third.load_state_dict(second[1].state_dict())
    used += read([third], 2)
    seen = [index for batch in used for index in batch]
    assert len(set(seen)) == len(seen) == 100


def test_epoch_starts_over_and_a_batch_too_large_is_refused() -> None:
    streams = Streams(num_samples=20)
    first = [batch.tolist() for batch in streams.batches(4)]
    streams.set_epoch(1)
    assert [batch.tolist() for batch in streams.batches(4)] == first
    with pytest.raises(SettingError, match=r"batch_size must be at most 10 .* got 11"):
        Streams(num_samples=20, world_size=2).num_batches(11)
