from __future__ import annotations

import doctest
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests import covering
from tests.covering import pairwise


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_two_values_meet(sizes: list[int]) -> None:
    columns = [[f"{number}-{value}" for value in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*columns)
    for first, second in combinations(range(len(columns)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(product(columns[first], columns[second]))
    assert len(set(rows)) == len(rows)


def test_it_is_much_smaller_than_the_product() -> None:
    assert len(pairwise(range(4), range(3), range(3), range(2))) <= 15  # of 72, and 12 is the least


def test_its_example_is_true() -> None:
    assert doctest.testmod(covering).failed == 0
