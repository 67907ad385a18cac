"""Leaves of a state: rules for other numbers of workers, other buckets, smaller parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from thinwire.engine.bucket_plan import make_buckets
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.leaves import Saved, dump_leaves, load_leaves, shrink
from thinwire.errors import DataError
from thinwire.strategies.base import OnResize

SHAPES = {"0.weight": (6, 5), "0.bias": (6,), "1.weight": (4, 6), "1.bias": (4,)}
"""Biases count as small."""
INITIAL = -1.0
ZERO = torch.zeros((), dtype=torch.float64)


def buckets_of(bucket_bytes: int) -> list[ParameterBucket]:
    named = [(name, Parameter(torch.zeros(shape, dtype=torch.float64))) for name, shape in SHAPES.items()]
    return make_buckets(named, bucket_bytes)


def made(rule: OnResize, bucket_bytes: int = 1 << 20) -> list[ParameterBucket]:
    """One leaf in every bucket, as `init` makes it."""
    buckets = buckets_of(bucket_bytes)
    for bucket in buckets:
        bucket.zeros("leaf", on_resize=rule).fill_(INITIAL)
    return buckets


def saved_by(world_size: int) -> list[Saved]:
    generator = torch.Generator().manual_seed(world_size)
    return [
        {
            "leaf": {
                name: torch.randn(shape, generator=generator, dtype=torch.float64)
                for name, shape in SHAPES.items()
            }
        }
        for _ in range(world_size)
    ]


def loaded(rule: OnResize, saved: list[Saved], rank: int, world_size: int, bucket_bytes: int = 1) -> Saved:
    found = made(rule, bucket_bytes)
    load_leaves(found, saved, rank, world_size)
    return dump_leaves(found)


def everyones(rule: OnResize, saved: list[Saved], world_size: int, name: str) -> list[Tensor]:
    return [loaded(rule, saved, rank, world_size)["leaf"][name] for rank in range(world_size)]


sizes = st.integers(1, 6)


@given(sizes, sizes)
def test_a_sum_is_conserved(before: int, after: int) -> None:
    saved = saved_by(before)
    for name in SHAPES:
        total = sum((each["leaf"][name] for each in saved), ZERO)
        parts = everyones("sum", saved, after, name)
        torch.testing.assert_close(sum(parts, ZERO), total)
        if before <= after:
            for part, own in zip(parts, saved, strict=False):
                assert torch.equal(part, own["leaf"][name]), "nothing to add up: not even rounded"
            assert not any(part.any() for part in parts[before:])


@given(sizes, sizes)
def test_a_mean_goes_to_all(before: int, after: int) -> None:
    saved = saved_by(before)
    for name in SHAPES:
        mean = torch.stack([each["leaf"][name] for each in saved]).mean(0)
        parts = everyones("mean", saved, after, name)
        for rank, part in enumerate(parts):
            torch.testing.assert_close(part, saved[rank]["leaf"][name] if before == after else mean)


@given(sizes, sizes)
def test_the_same_is_the_first_ones_and_reset_begins_anew(before: int, after: int) -> None:
    saved = saved_by(before)
    for rank in range(after):
        same, reset = (loaded(rule, saved, rank, after)["leaf"] for rule in ("same", "reset"))
        for name in SHAPES:
            own = saved[rank]["leaf"][name] if before == after else None
            assert torch.equal(same[name], saved[0]["leaf"][name] if own is None else own)
            assert torch.equal(
                reset[name], torch.full(SHAPES[name], INITIAL, dtype=torch.float64) if own is None else own
            )


@pytest.mark.parametrize("bucket_bytes", [1, 200, 260, 1 << 20])
def test_other_buckets_take_it_over_by_name(bucket_bytes: int) -> None:
    (saved,) = saved_by(1)
    found = made("sum", bucket_bytes)
    load_leaves(found, [saved], 0, 1)
    again = dump_leaves(found)
    assert again["leaf"].keys() == SHAPES.keys()
    assert all(torch.equal(again["leaf"][name], saved["leaf"][name]) for name in SHAPES)


def test_there_are_buckets_of_all_kinds() -> None:
    assert [len(buckets_of(num_bytes)) for num_bytes in (1, 200, 260, 1 << 20)] == [4, 2, 2, 1]
    assert buckets_of(1 << 20)[0].names == ["1.weight", "0.weight", "1.bias", "0.bias"]


def test_a_copy_is_dumped_and_loading_overwrites_in_place() -> None:
    found = made("sum")
    data = found[0].leaves["leaf"].data
    saved = dump_leaves(found)
    data.zero_()
    assert all((part == INITIAL).all() for part in saved["leaf"].values())
    load_leaves(found, [saved], 0, 1)
    assert (data == INITIAL).all()


def test_a_parameter_that_some_have_not_saved_stays_as_it_was_made() -> None:
    saved = saved_by(2)
    del saved[1]["leaf"]["0.bias"]  # counted as small there
    for world_size in (2, 3):
        result = loaded("sum", saved, 0, world_size)["leaf"]
        assert (result["0.bias"] == INITIAL).all()
        assert torch.equal(result["0.weight"], saved[0]["leaf"]["0.weight"])
    assert all((part == INITIAL).all() for part in loaded("sum", [{}, {}], 0, 2)["leaf"].values())


def test_another_shape_is_refused_by_name() -> None:
    (saved,) = saved_by(1)
    saved["leaf"]["1.weight"] = torch.zeros(6, 4)
    with pytest.raises(
        DataError, match=r"leaf of 1.weight does not fit: saved \(6, 4\), this run has \(4, 6\)"
    ):
        loaded("sum", [saved], 0, 1)


def test_parameters_that_shrink_keep_the_same_indices() -> None:
    (saved,) = saved_by(1)
    rows, columns = torch.tensor([0, 3, 5]), torch.tensor([1, 4])
    small = shrink(saved, {"0.weight": [rows, columns], "0.bias": [rows], "1.weight": [None, rows]})
    before, after = saved["leaf"], small["leaf"]
    assert torch.equal(after["0.weight"], before["0.weight"][rows][:, columns])
    assert torch.equal(after["0.bias"], before["0.bias"][rows])
    assert torch.equal(after["1.weight"], before["1.weight"][:, rows])
    assert torch.equal(after["1.bias"], before["1.bias"])
