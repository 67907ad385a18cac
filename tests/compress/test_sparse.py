from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kinds import WITHOUT_TRITON, using
from thinwire.compress.sparse import (
    COUNT,
    NOT_FINITE,
    PASSED,
    Sparse,
    SparseLayout,
    Values,
    add_,
    keep_largest,
    merge,
    merge_messages_,
    new_message,
    read,
    without,
    write_,
)
from thinwire.errors import NumericError, SettingError

VECTORS = st.dictionaries(st.integers(0, 40), st.integers(-3, 3).map(float), max_size=20)
Vector = dict[int, float]


def sparse(vector: Vector, dtype: torch.dtype = torch.float32) -> Sparse:
    index = sorted(vector)
    return Sparse(
        torch.tensor(index, dtype=torch.int32), torch.tensor([vector[i] for i in index], dtype=dtype)
    )


def plain(entries: Sparse) -> Vector:
    index: list[int] = entries.index.tolist()
    assert index == sorted(set(index))
    assert entries.index.dtype == torch.int32
    return dict(zip(index, entries.value.tolist(), strict=True))


def summed(a: Vector, b: Vector) -> Vector:
    return {i: a.get(i, 0.0) + b.get(i, 0.0) for i in a.keys() | b.keys()}


def largest(vector: Vector, k: int) -> set[int]:
    return set(sorted(vector, key=lambda i: (-abs(vector[i]), i))[:k])


@pytest.mark.parametrize("kind", WITHOUT_TRITON)
@given(a=VECTORS, b=VECTORS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_merge_adds_what_both_have(kind: str, a: Vector, b: Vector, dtype: torch.dtype) -> None:
    with using(kind):
        total = merge(sparse(a, dtype), sparse(b, dtype))
    assert plain(total) == summed(a, b)
    assert total.value.dtype == dtype


@pytest.mark.parametrize("kind", WITHOUT_TRITON)
@given(a=VECTORS, b=VECTORS, k=st.integers(0, 45))
def test_the_largest_of_a_sum_are_kept_and_the_rest_is_given_back(
    kind: str, a: Vector, b: Vector, k: int
) -> None:
    with using(kind):
        kept, dropped = keep_largest(merge(sparse(a), sparse(b)), k)
    total = summed(a, b)
    keep = largest(total, k)
    assert plain(kept) == {i: total[i] for i in keep}
    assert plain(dropped) == {i: total[i] for i in total.keys() - keep}


@pytest.mark.parametrize("kind", WITHOUT_TRITON)
@given(
    a=VECTORS,
    b=VECTORS,
    room=st.integers(0, 20),
    block=st.integers(1, 5),
    form=st.sampled_from([("fp32", 4), ("fp32", 8), ("bf16", 4)]),
)
def test_messages_are_merged_in_place_and_a_block_keeps_the_rest_together(
    kind: str, a: Vector, b: Vector, room: int, block: int, form: tuple[Values, int]
) -> None:
    values, itemsize = form
    dtype = torch.float32 if itemsize == 4 else torch.float64
    layout = SparseLayout(capacity=max(1, room, len(a), len(b)), values=values, itemsize=itemsize)
    residuals = [torch.ones(41, dtype=dtype) for _ in range(block)]
    message, other = new_message(layout, residuals[0]), new_message(layout, residuals[0])
    write_(message, layout, sparse({i: x / 3 for i, x in a.items()}, dtype))
    write_(other, layout, sparse({i: x / 3 for i, x in b.items()}, dtype))
    sent = [plain(read(each, layout)) for each in (message, other)]
    results = [message.clone() for _ in residuals]
    for place, residual in enumerate(residuals):
        with using(kind):
            add_(residual, merge_messages_(results[place], other, layout, share=(place, block)))
    assert all(torch.equal(each, results[0]) for each in results)
    assert int(results[0][PASSED]) == len(a) + len(b)
    total, kept = summed(*sent), plain(read(results[0], layout))
    assert set(kept) == set(plain(keep_largest(sparse(total, dtype), layout.capacity)[0]))
    added = torch.stack(residuals).sum(0) - block
    for i in range(41):
        assert float(added[i]) + kept.get(i, 0.0) == pytest.approx(total.get(i, 0.0), abs=1e-6)


@pytest.mark.parametrize("kind", WITHOUT_TRITON)
def test_a_message_that_says_not_finite_is_not_merged(kind: str) -> None:
    layout, residual = SparseLayout(capacity=4), torch.zeros(8)
    message, other = new_message(layout, residual), new_message(layout, residual)
    other[COUNT] = NOT_FINITE
    with using(kind), pytest.raises(NumericError, match="NaN or infinity"):
        merge_messages_(message, other, layout, share=(0, 1))


@given(a=VECTORS, b=VECTORS)
def test_without(a: Vector, b: Vector) -> None:
    rest = without(sparse(a), sparse(b).index)
    assert plain(rest) == {i: value for i, value in a.items() if i not in b}


@given(a=VECTORS, scale=st.sampled_from([1.0, 0.25]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_add_to_a_dense_vector(a: Vector, scale: float, dtype: torch.dtype) -> None:
    dense = torch.ones(41, dtype=dtype)
    add_(dense, sparse(a), scale)
    assert dense.tolist() == [1 + scale * a.get(i, 0.0) for i in range(41)]


@given(a=VECTORS, spare=st.integers(0, 3), itemsize=st.sampled_from([4, 8]))
def test_entries_go_through_a_message_unchanged(a: Vector, spare: int, itemsize: int) -> None:
    layout = SparseLayout(capacity=max(1, len(a) + spare), itemsize=itemsize)
    value = torch.float32 if itemsize == 4 else torch.float64
    message = new_message(layout, torch.empty(0))
    assert plain(read(message, layout)) == {}
    write_(message, layout, sparse(a, value))
    assert plain(read(message, layout)) == a
    assert read(message, layout).value.dtype == value
    assert message.nbytes == layout.num_bytes


def test_bf16_rounds_values_and_takes_less() -> None:
    layout = SparseLayout(capacity=4, values="bf16")
    message = new_message(layout, torch.empty(0))
    write_(message, layout, sparse({3: 1.0, 7: 1.003}))
    assert plain(read(message, layout)) == {3: 1.0, 7: 1.0}
    assert layout.num_bytes < SparseLayout(capacity=4).num_bytes


def test_nothing_merges_with_nothing() -> None:
    nothing = sparse({})
    assert plain(merge(nothing, nothing)) == {}
    kept, dropped = keep_largest(nothing, 3)
    assert plain(kept) == plain(dropped) == {}


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"capacity": 0}, "capacity"), ({"capacity": 1, "values": "int3"}, "values")],
)
def test_wrong_settings_are_named(settings: dict[str, Tensor], field: str) -> None:
    with pytest.raises(SettingError, match=field):
        SparseLayout(**settings)  # type: ignore[arg-type]
