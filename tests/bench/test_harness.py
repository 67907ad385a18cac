"""The harness: what is counted per step, and that benchmarks share it."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.exact_lab import CELLS, best_ddp
from benchmarks.exact_systems import BucketedDdp, all_rivals
from tests.bench.records import timed
from thinwire.bench.harness import time_steps, training, warm_up_steps
from thinwire.bench.systems import find, ours
from thinwire.bench.tables import step_rows
from thinwire.timings import speed_ratio


def test_times_and_counters_are_per_step() -> None:
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        done += steps
        time.sleep(0.01 * steps)

    train(2)  # counters may start anywhere
    found = time_steps(train, 4, lambda: {"bytes": 10.0 * done})
    assert found["bytes"] == 10
    assert 0.01 <= found["step_s"] < 1
    assert found["processor_s"] < found["step_s"]


def test_the_loop_that_is_timed_trains() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    training(model, torch.optim.SGD(model.parameters(), lr=0.1))(3)
    assert not torch.equal(model.weight, before)


def test_systems_that_adapt_are_warmed_up_for_as_long() -> None:
    auto = ours("gossip-grad:share=auto")
    assert warm_up_steps(auto) == auto.strategy.adapts_in > 0
    assert warm_up_steps(ours("all-reduce:overlap=forward")) > warm_up_steps(ours("all-reduce")) == 0
    assert warm_up_steps(BucketedDdp(num_buckets=4)) == 0


def test_every_cell_of_the_exact_benchmark_has_ddp_with_three_numbers_of_buckets() -> None:
    rivals = all_rivals()
    for cell in CELLS.values():
        assert all(find(name, rivals).name == name for name in cell.systems)
        assert sum(name.startswith("ddp") for name in cell.systems) == 3
    assert {cell.workers for cell in CELLS.values()} == {2, 4, 8}


def test_the_best_ddp_is_the_reference_turn_by_turn() -> None:
    names = ("silent", "ddp-4-buckets", "ddp-8-buckets", "all-reduce")
    records = [
        timed(name, turn, step_s) for turn in (0, 1) for name, step_s in zip(names, (1, 3, 2, 4), strict=True)
    ]
    records[-1] = timed("all-reduce", 1, 1.0)
    assert best_ddp(step_rows(records, names)) == "ddp-8-buckets"
    ratio = speed_ratio(records[2::4], records[3::4])
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.count) == (0.875, 1.25, 2)
