"""Pairwise covering: few rows instead of a full product of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose rows of the product such that any two values of two columns meet in at least one row.

    Most faults need one value or two that meet; a full product repeats every pair many times. The choice is
    greedy and deterministic, so test ids stay the same.

    >>> pairwise("ab", "xy", [1, 2])
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    places = [range(len(column)) for column in columns]

    def pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(combinations(enumerate(row), 2))

    candidates = {row: pairs(row) for row in product(*places)}
    uncovered = set[tuple[tuple[int, int], tuple[int, int]]]().union(*candidates.values())
    rows = []
    while uncovered:
        row = max(candidates, key=lambda row: len(candidates[row] & uncovered))
        uncovered -= candidates.pop(row)
        rows.append(row)
    return [tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in sorted(rows)]
