"""Samples while workers come and go: every one of an epoch exactly once."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.elastic.sampler import ElasticSampler, deal
from thinwire.errors import SettingError


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 7))
def test_dealt_counts_add_up_and_nobody_is_left_without(count: int, world_size: int, batch_size: int) -> None:
    steps = deal(count, world_size, world_size * batch_size)
    used = sum(map(sum, steps))
    assert count - world_size < used <= count
    for sizes in steps:
        assert len(sizes) == world_size
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size
    if batch_size > 1 and steps:
        assert used == count


@settings(deadline=None, max_examples=150)
@given(
    num_samples=st.integers(8, 200),
    batch_size=st.integers(1, 6),
    fixed=st.sampled_from(["worker", "global"]),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**20)), min_size=1, max_size=6),
)
def test_every_sample_is_seen_exactly_once_an_epoch(
    num_samples: int, batch_size: int, fixed: str, worlds: list[tuple[int, int]]
) -> None:
    """Worlds of any size follow each other, each ending after any number of batches by each worker."""
    batch_size = batch_size if fixed == "worker" else 6 * batch_size
    common = ElasticSampler(num_samples=num_samples, batch_size=batch_size, fixed=fixed, seed=3)
    seen: Counter[int] = Counter()

    def workers(size: int) -> list[ElasticSampler]:
        made = [copy.deepcopy(common) for _ in range(size)]
        for rank, each in enumerate(made):
            each.load_state_dict(common.state_dict())
            each.place(rank, size)
        return made

    for size, noise in worlds:
        there = workers(size)
        common.place(0, size)
        done = [(noise >> 3 * rank) % (1 + len(each)) for rank, each in enumerate(there)]
        for each, number in zip(there, done, strict=True):
            for batch, _ in zip(each, range(number), strict=False):
                seen.update(batch)
        common.account(done)
    there = workers(2)
    common.place(0, 2)
    for each in there:
        for batch in each:
            seen.update(batch)
            each.take()
    common.next_epoch()
    assert all(count == 1 for count in seen.values())
    assert len(seen) + len(common._carried) == num_samples
    assert len(common._carried) < 2
    common.place(0, 1)
    for batch in common:
        seen.update(batch)
    assert set(seen.values()) == {2}, "what was left over comes with the next epoch"


def test_unequal_batches_are_weighted_by_their_size() -> None:
    samplers = [ElasticSampler(num_samples=7, batch_size=2) for _ in range(2)]
    for rank, each in enumerate(samplers):
        each.place(rank, 2)
    assert [each.weight for each in samplers] == [1.0, 1.0]
    for each in samplers:
        each.take()
    assert [each.weight for each in samplers] == [4 / 3, 2 / 3]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(SettingError, match="fixed must be 'worker' or 'global'"):
        ElasticSampler(num_samples=7, batch_size=2, fixed="all")
    with pytest.raises(SettingError, match="batch_size must be 3 or more"):
        ElasticSampler(num_samples=7, batch_size=2, fixed="global").place(0, 3)
