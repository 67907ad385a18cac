from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.engine.bucket_plan import Item, make_buckets, plan, small_numel
from thinwire.engine.buckets import ParameterBucket, TrainingContext
from thinwire.engine.optimizer import give_optimizer_state
from thinwire.errors import UsageError

items = st.lists(st.builds(Item, st.integers(0, 5 << 20), st.sampled_from(["fp32", "bf16"])), max_size=40)


@given(items, st.integers(1, 4 << 20))
def test_plan_holds_every_parameter_once_by_kind_and_close_to_the_limit(
    items: list[Item], limit: int
) -> None:
    buckets = plan(items, limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert len({items[i].kind for i in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
        assert sum(items[i].num_bytes for i in bucket[:-1]) < limit


@given(items, st.integers(1, 4 << 20), st.integers(0, 4 << 20))
def test_plan_with_small_ends_holds_every_parameter_once_by_kind(
    items: list[Item], limit: int, end: int
) -> None:
    buckets = plan(items, limit, end)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(items)))
    assert all(len({items[i].kind for i in bucket}) == 1 for bucket in buckets)


@given(items, st.integers(1, 4 << 20))
def test_plan_closes_buckets_in_the_order_backward_fills_them(items: list[Item], limit: int) -> None:
    full = [b for b in plan(items, limit) if sum(items[i].num_bytes for i in b) >= limit]
    last = [bucket[-1] for bucket in full]
    assert last == sorted(last, reverse=True)


def test_the_first_and_the_last_bucket_may_be_smaller() -> None:
    items = [Item(1 << 20, "fp32")] * 8
    assert [len(bucket) for bucket in plan(items, 3 << 20)] == [3, 3, 2]
    assert [len(bucket) for bucket in plan(items, 3 << 20, 1 << 20)] == [1, 3, 3, 1]
    assert [len(bucket) for bucket in plan(items, 4 << 20, 1 << 20)] == [1, 4, 2, 1]
    assert [len(bucket) for bucket in plan(items, 5 << 20, 1 << 20)] == [1, 6, 1]  # 1 joins 5
    assert [len(bucket) for bucket in plan(items, 99 << 20, 1 << 20)] == [1, 6, 1]
    assert [len(bucket) for bucket in plan(items, 99 << 20, 9 << 20)] == [8]


def bucket_of(parameters: list[nn.Parameter], small: int = 0, **context: int) -> ParameterBucket:
    names = [f"p{number}" for number in range(len(parameters))]
    return ParameterBucket(0, names, parameters, small, TrainingContext(**context))


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6)


@given(shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 9))
def test_gradients_go_in_and_out_unchanged(shapes: list[list[int]], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    bucket = bucket_of(parameters, small=5)
    own = bucket.gather_(1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    bucket.scatter_(own)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, grads, strict=True) if p.grad is not None)


@given(shapes, st.integers(0, 9))
def test_parameters_are_read_written_and_added_to(shapes: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    bucket = bucket_of(parameters)
    before = bucket.read()
    change = torch.randn(bucket.num_parameters, generator=generator)
    bucket.add_(change, 0.5)
    torch.testing.assert_close(bucket.read(), before + 0.5 * change)
    bucket.write_(before)
    assert torch.equal(bucket.read(), before)
    bucket.lerp_(change, 0.25)
    torch.testing.assert_close(bucket.read(), before.lerp(change, 0.25))
    weights = torch.rand(bucket.num_parameters, generator=generator)
    bucket.write_(before)
    bucket.lerp_(change, weights)
    torch.testing.assert_close(bucket.read(), before.lerp(change, weights))


def test_small_tensors_and_bookkeeping_come_last() -> None:
    linear = nn.Linear(3, 2)
    (bucket,) = make_buckets(list(linear.named_parameters()), 1 << 20)
    assert bucket.names == ["weight", "bias"]
    assert bucket.exact_from == 6
    assert bucket.gradient.numel() == 6 + 2 + 2 + 2


def test_small_is_a_matter_of_size_and_not_of_shape() -> None:
    model = nn.ParameterDict(
        {"vector": torch.zeros(1000), "table": torch.zeros(4, 4), "bias": torch.zeros(40)}
    )
    named = list(model.named_parameters())
    assert small_numel(model.parameters()) == 32
    (bucket,) = make_buckets(named, 1 << 20)
    assert bucket.names == ["vector", "bias", "table"]
    assert bucket.exact_from == 1040
    assert [bucket.name_at(place) for place in (0, 999, 1000, 1040)] == ["vector", "vector", "bias", "table"]


def test_state_by_parameter_covers_all_or_the_large_ones() -> None:
    large, small = nn.Parameter(torch.ones(2, 3).bfloat16()), nn.Parameter(torch.ones(2).bfloat16())
    bucket = bucket_of([small, large], small=2)
    everything = bucket.zeros("sum", on_resize="mean")
    some = bucket.zeros("residual", on_resize="sum", part="large")
    kept = bucket.keep("centre", bucket.read(), on_resize="same")
    assert everything.dtype == some.dtype == torch.float32, "half precision is too little to add up in"
    assert kept.dtype == torch.bfloat16
    assert [data.numel() for data in (everything, some, kept)] == [8, 6, 8]
    assert {name: (leaf.on_resize, leaf.names) for name, leaf in bucket.leaves.items()} == {
        "sum": ("mean", ["p1", "p0"]),
        "residual": ("sum", ["p1"]),
        "centre": ("same", ["p1", "p0"]),
    }
    parts = dict(bucket.leaves["centre"].parts())
    assert parts["p1"].shape == (2, 3)
    assert parts["p0"].data_ptr() == kept[6:].data_ptr()


def test_parameters_are_written_in_the_training_thread_only() -> None:
    bucket = bucket_of([nn.Parameter(torch.zeros(2))], thread=threading.get_ident() + 1)
    for write in (bucket.write_, bucket.add_, lambda data: bucket.lerp_(data, 0.5)):
        with pytest.raises(UsageError, match="outside the training thread"):
            write(torch.ones(2))
    assert not bucket.read().any()


def test_a_parameter_nobody_used_keeps_having_no_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    bucket = bucket_of([used, unused])
    bucket.scatter_(bucket.gather_(1.0))
    assert unused.grad is None


def test_channels_last_gradients_survive() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5))
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parameter.grad = grad.clone(memory_format=torch.preserve_format)
    bucket = bucket_of([parameter])
    own = bucket.gather_(1.0)
    parameter.grad.zero_()
    bucket.scatter_(own)
    assert torch.equal(parameter.grad, grad)


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    (bucket,) = make_buckets(list(embedding.named_parameters()), 1 << 20)
    with pytest.raises(UsageError, match="gradient of weight is sparse"):
        bucket.gather_(1.0)


@pytest.mark.parametrize(("start", "stop"), [(0, 41), (0, 5), (3, 7), (5, 6), (29, 41), (40, 41), (7, 7)])
def test_a_span_is_a_part_of_the_whole(start: int, stop: int) -> None:
    """Of parameters, one of which does not lie in one piece, and of what the optimizer keeps for them."""
    parameters = [
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.randn(4, 6).t()),
        nn.Parameter(torch.randn(3, 4)),
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    bucket = bucket_of(parameters)
    give_optimizer_state([bucket], [optimizer])
    for parameter in parameters[1:]:  # the first was not used: the optimizer keeps nothing for it
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for values in (bucket, bucket.optimizer_state["momentum_buffer"]):
        whole = values.read()
        assert torch.equal(values.read_span(start, stop), whole[start:stop])
        data = torch.randn(stop - start)
        values.add_span_(start, data, scale=0.5)
        wanted = torch.zeros_like(whole)
        wanted[start:stop] = data
        expected = whole + 0.5 * wanted
        if values is not bucket:
            expected[:5] = 0.0
        assert torch.equal(values.read(), expected)


def test_whether_parameters_are_finite() -> None:
    parameters = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4, 6))]
    bucket = bucket_of(parameters)
    assert bucket.is_finite()
    with torch.no_grad():
        parameters[1][2, 3] = float("inf")
    assert not bucket.is_finite()
