"""A threshold for every bucket, such that together they pass the largest numbers of the whole model.

When a bucket is ready, those after it are not, so what is the largest of the model is not known yet. What
the buckets had of it in the last steps is: each has a share of what may pass. From a sample of the bucket as
it is now follows the threshold that its share will pass; from the tails of all samples, once they are there,
follow the shares of the next step; and what has passed corrects the sum of them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.select import magnitudes
from thinwire.compress.sparse import PASSED

SAMPLE = 1 << 15
"""Numbers of a bucket that are sampled, at equal distances."""
TAIL = 4
"""Length of a sample's tail, which is compared with those of other buckets, in multiples of its share."""
STEEPNESS = 8
"""Tail model beyond the largest of a sample: doubling t divides P(abs(x) > t) by 2 ** STEEPNESS."""
MEMORY = 0.8
"""Part of the old share in the new one: the tail of a sample is a few numbers, so it is noisy."""
CORRECTION = 0.1
"""Exponent of the factor by which the count was missed, where it corrects the next one."""


@dataclass(slots=True, kw_only=True)
class Threshold:
    """The shares of the buckets, and what they are learned from; a plain state that can be saved."""

    sizes: list[int]
    """Numbers in every bucket; those without any have no threshold."""
    shares: list[float]
    """How dense a bucket is, as a multiple of the whole model's density."""
    correction: float = 1.0
    """Factor on the density asked for, so that as many numbers pass."""
    step: int = 0
    _density: float = field(default=0.0, init=False, repr=False)
    _tails: dict[int, tuple[Tensor, float]] = field(default_factory=dict, init=False, repr=False)
    """The largest of every bucket's sample, and how many numbers each of them stands for."""
    _passed: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def before(self, bucket: int, gradient: Tensor, residual: Tensor, density: float) -> Tensor:
        """The threshold for a bucket that is about to be selected from: one number, on its device."""
        size = self.sizes[bucket]
        stride = max(1, size // SAMPLE)
        sample = magnitudes(gradient, residual, stride, start=self.step * 7919 % stride)
        rank = self.shares[bucket] * self.correction * density * sample.numel()
        tail = sample.topk(min(sample.numel(), math.ceil(TAIL * rank) + 16)).values
        self._tails[bucket] = tail, size / sample.numel()
        self._density = density
        # What is equal to it shall pass, too, for there may be many of them.
        threshold = tail[min(max(round(rank), 1), tail.numel()) - 1].nextafter(tail.new_zeros(()))
        return threshold if rank >= 1 or stride == 1 else threshold * max(rank, 0.01) ** (-1 / STEEPNESS)

    def after(self, bucket: int, message: Tensor) -> None:
        """Take note of how many passed in a bucket; waits for the message's device."""
        self._passed[bucket] = int(message[PASSED])
        if len(self._passed) == sum(size > 0 for size in self.sizes):
            self._learn()
            self.step += 1

    def _learn(self) -> None:
        numel = sum(self.sizes)
        wanted = self._density * numel
        missed = wanted / max(1, sum(self._passed.values()))
        self.correction *= min(3.0, max(1 / 3, missed)) ** CORRECTION
        self.correction = min(2.0, max(0.5, self.correction))
        tails = {bucket: (tail.cpu().numpy(), weight) for bucket, (tail, weight) in self._tails.items()}
        largest = np.concatenate([tail for tail, _ in tails.values()])
        order = np.argsort(-largest, kind="stable")
        weights = np.concatenate([np.full(len(tail), weight) for tail, weight in tails.values()])[order]
        place = int(np.searchsorted(weights.cumsum(), wanted))
        level = largest[order[min(place, len(order) - 1)]]
        if level == 0:
            return
        for bucket, (tail, weight) in tails.items():
            seen = weight * int((tail >= level).sum()) / (self._density * self.sizes[bucket])
            self.shares[bucket] = MEMORY * self.shares[bucket] + (1 - MEMORY) * seen
        scale = numel / sum(share * size for share, size in zip(self.shares, self.sizes, strict=True))
        self.shares = [share * scale for share in self.shares]

    def begin(self) -> None:
        """A pass begins: forget the last one, which a dense bucket or a failure may have left incomplete."""
        self._tails.clear()
        self._passed.clear()


def new_threshold(residuals: Sequence[Tensor]) -> Threshold:
    """A threshold for buckets with these residuals, in this order; all equally dense until more is known."""
    return Threshold(sizes=[r.numel() for r in residuals], shares=[1.0] * len(residuals))
