"""Fragments: every number of the model is due once in every interval, whatever the sizes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.strategies.local.fragments import Fragments, Pattern


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Fragments, int]:
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    interval = draw(st.integers(1, 12))
    pattern: Pattern = draw(st.sampled_from(["sequential", "strided"]))
    return Fragments(numels, draw(st.integers(1, interval)), pattern), interval


@given(case=cuts(), first=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_every_number_is_due_once_in_an_interval(case: tuple[Fragments, int], first: int) -> None:
    fragments, interval = case
    for bucket, numel in enumerate(fragments.numels):
        seen = Counter[int]()
        for step in range(first, first + interval):
            for start, stop in fragments.due(bucket, step, interval):
                assert 0 <= start < stop <= numel
                seen.update(range(start, stop))
        assert seen == Counter(range(numel))


@given(case=cuts())
@settings(max_examples=100, deadline=None)
def test_fragments_are_of_equal_size(case: tuple[Fragments, int]) -> None:
    fragments, interval = case
    sizes = []
    for step in range(1, interval + 1):
        spans = [
            span for bucket in range(len(fragments.numels)) for span in fragments.due(bucket, step, interval)
        ]
        sizes.append(sum(stop - start for start, stop in spans))
    due = sum(size > 0 for size in sizes)
    assert due <= fragments.count
    assert max(sizes) <= -(-sum(fragments.numels) // fragments.count) + 4
