"""Bytes that one worker sends per step for one layer, data-parallel or split; no torch.

N workers in G groups of T = N / G. A group holds one copy of a split layer, each worker a strip of its
features. Das et al. (2016, arXiv:1602.06709) count 2 size_data ifm minibatch / G for activations and
size_data ifm ofm (2 - overlap) G / N for weights; here is the same, exact for rings and all-to-all, and for
both ways to split a layer. `planner/balance.py` has the formulas of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["colwise", "rowwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """A matrix of weights, and the activations that go through it."""

    in_features: int
    """Numbers that come in per row; 0: only an index does (an embedding)."""
    out_features: int
    num_weights: int
    """With the bias."""
    rows: float
    """Per worker and step: samples, or tokens."""
    number_bytes: int = 4

    def data_bytes(self, num_workers: int) -> float:
        """Gradients around a ring of all workers."""
        return self.number_bytes * 2 * (num_workers - 1) / num_workers * self.num_weights

    def hybrid_bytes(self, num_workers: int, groups: int, split: Split) -> float:
        """Activations inside a group, forward and backward, and the strip's gradients across groups."""
        size = num_workers // groups
        gradients = 2 * (groups - 1) / groups * self.num_weights / size
        return self.number_bytes * (gradients + self.activations(size, split))

    def activations(self, size: int, split: Split) -> float:
        """Numbers sent: the one side of the layer goes to all of the group, the other is exchanged."""
        if self.in_features == 0:
            indices = 2 * (size - 1)  # of 8 bytes
            return self.rows * (indices + 2 * (size - 1) / size * self.out_features)
        to_all, exchanged = self.in_features, self.out_features
        if split == "rowwise":
            to_all, exchanged = exchanged, to_all
        return 2 * self.rows * (size - 1) * (to_all + exchanged / size)

    def activation_messages(self, size: int) -> int:
        """Messages one after another: four moves, each with all others of the group."""
        return 4 * (size - 1)

    @property
    def better_split(self) -> Split:
        """The one that sends the narrower side to all."""
        return "rowwise" if self.in_features > self.out_features else "colwise"


def divisors(number: int) -> list[int]:
    """
    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [each for each in range(1, number + 1) if number % each == 0]
