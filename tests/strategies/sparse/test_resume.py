"""What was not sent yet survives a stop, also with another number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.engine.saving import Job, run, same
from thinwire.strategies.sparse.base import SparseStrategy

STRATEGIES = [tw.TopK(density=0.1), tw.GTopK(density=0.1), tw.OkTopK(density=0.1)]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


def summed(residuals: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.cat(each) for each in residuals]).sum(0)


@every_strategy
def test_as_many_workers_go_on_with_the_same_bits(strategy: SparseStrategy, tmp_path: Path) -> None:
    whole = run(3, Job(folder=tmp_path / "whole", until=8, strategy=strategy))
    run(3, Job(folder=tmp_path / "parts", until=4, save_at=(4,), strategy=strategy))
    parts = run(3, Job(folder=tmp_path / "parts", until=8, strategy=strategy))
    for a, b in zip(whole, parts, strict=True):
        assert same(a.weights, b.weights)
        assert same(a.residuals, b.residuals)


@every_strategy
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 5), (3, 1)])
def test_another_number_of_workers_keeps_the_sum(
    strategy: SparseStrategy, before: int, after: int, tmp_path: Path
) -> None:
    saved = run(before, Job(folder=tmp_path, until=2, save_at=(2,), strategy=strategy))
    kept = summed([each.residuals for each in saved])
    assert bool(kept.any())
    loaded = run(after, Job(folder=tmp_path, until=2, strategy=strategy))
    torch.testing.assert_close(summed([each.residuals for each in loaded]), kept)
    went_on = run(after, Job(folder=tmp_path, until=5, strategy=strategy))
    assert all(same(each.weights, went_on[0].weights) for each in went_on)
