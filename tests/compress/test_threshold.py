from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from thinwire.compress import threshold
from thinwire.compress.select import select_
from thinwire.compress.sparse import PASSED, SparseLayout, new_message, read
from thinwire.compress.threshold import Threshold, new_threshold
from thinwire.engine.state import dump, load
from thinwire.errors import NumericError

SIZES = [20_000, 0, 60_000, 300, 40_000]
SCALES = [0.5, 1.0, 1.0, 4.0, 2.0]
LAYOUT = SparseLayout(capacity=60_000)


class Model:
    """Buckets of different scale, their gradients noise around a direction that stays."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.widths = [
            scale * torch.randn(size, generator=self.generator).exp_()
            for size, scale in zip(sizes, SCALES, strict=True)
        ]
        self.direction = [0.1 * torch.randn(size, generator=self.generator) for size in sizes]
        self.residuals = [torch.zeros(size) for size in sizes]
        self.message = new_message(LAYOUT, self.residuals[0])

    def gradient(self, bucket: int, loudness: float = 1.0) -> Tensor:
        noise = torch.randn(self.widths[bucket].shape, generator=self.generator)
        return loudness * self.widths[bucket] * (noise + self.direction[bucket])

    def step(self, thresholds: Threshold, density: float, loudness: float = 1.0) -> list[int]:
        """How many pass in every bucket."""
        passed = []
        for bucket, residual in enumerate(self.residuals):
            if residual.numel():
                gradient = self.gradient(bucket, loudness)
                limit = thresholds.before(bucket, gradient, residual, density)
                select_(gradient, residual, limit, self.message, LAYOUT)
                thresholds.after(bucket, self.message)
                passed.append(int(self.message[PASSED]))
        return passed


@pytest.fixture(autouse=True)
def samples_are_smaller_than_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "SAMPLE", 4096)


def quiet(step: int) -> float:
    return 0.1 if step >= 30 else 1.0


def fading(step: int) -> float:
    return 0.97**step


@pytest.mark.parametrize("density", [0.1, 0.01, 0.002])
@pytest.mark.parametrize("loudness", [None, quiet, fading])
def test_what_passes_is_the_density_of_the_whole_model(
    density: float, loudness: Callable[[int], float] | None
) -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    ratios = [
        sum(model.step(thresholds, density, loudness(step) if loudness else 1.0)) / (density * sum(SIZES))
        for step in range(60)
    ]
    assert mean(ratios[10:]) == pytest.approx(1, abs=0.08)
    assert max(ratios) < 2
    assert min(ratios) > 0.4


def test_the_largest_of_the_model_pass_wherever_they_are() -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    for _ in range(30):
        model.step(thresholds, 0.01)
    limits = []
    for bucket, residual in enumerate(model.residuals):
        if residual.numel():
            limits.append(float(thresholds.before(bucket, model.gradient(bucket), residual, 0.01)))
    assert max(limits) < 2 * min(limits)  # the buckets' scales differ by 8
    assert thresholds.shares[4] > 2 * thresholds.shares[2] > 4 * thresholds.shares[0]


def test_a_small_model_is_looked_at_completely() -> None:
    with patch.object(threshold, "SAMPLE", 1 << 15):
        model = Model([2000, 0, 1000, 300, 500])
        thresholds = new_threshold(model.residuals)
        for _ in range(30):
            assert 30 <= sum(model.step(thresholds, 0.01)) <= 45


def test_density_may_change_from_step_to_step() -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    for density in [0.25] * 5 + [0.06] * 5 + [0.015] * 5 + [0.004] * 5:
        passed = sum(model.step(thresholds, density))
        assert passed == pytest.approx(density * sum(SIZES), rel=0.6)


def test_many_equal_numbers_pass() -> None:
    residual = torch.zeros(1000)
    gradient = torch.ones(1000)
    limit = new_threshold([residual]).before(0, gradient, residual, 0.01)
    message = new_message(LAYOUT, residual)
    select_(gradient, residual, limit, message, LAYOUT)
    assert int(message[PASSED]) == 1000


def test_nothing_passes_where_all_is_zero() -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    assert sum(model.step(thresholds, 0.01, loudness=0.0)) == 0
    model.step(thresholds, 0.01)
    assert sum(model.step(thresholds, 0.01)) == pytest.approx(0.01 * sum(SIZES), rel=0.5)


def test_what_is_not_finite_is_left_to_selecting() -> None:
    residual, gradient = torch.zeros(100), torch.full((100,), math.nan)
    limit = new_threshold([residual]).before(0, gradient, residual, 0.01)
    message = new_message(LAYOUT, residual)
    select_(gradient, residual, limit, message, LAYOUT)
    with pytest.raises(NumericError):
        read(message, LAYOUT)


def test_a_step_that_was_given_up_is_forgotten() -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    thresholds.before(0, model.gradient(0), model.residuals[0], 0.01)
    model.step(thresholds, 0.01)
    assert thresholds.step == 1


def test_it_goes_on_where_it_was_saved() -> None:
    model = Model()
    thresholds = new_threshold(model.residuals)
    for _ in range(5):
        model.step(thresholds, 0.01)
    loaded = load(new_threshold(model.residuals), dump(thresholds, set()))
    gradient = model.gradient(0)
    assert loaded.before(0, gradient, model.residuals[0], 0.01) == thresholds.before(
        0, gradient, model.residuals[0], 0.01
    )
    assert dump(loaded, set()) == dump(thresholds, set())
