from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kinds import KINDS, using
from thinwire.compress import kernels, select
from thinwire.compress.select import prepare, refuse, select_, select_largest_
from thinwire.compress.sparse import COUNT, PASSED, Sparse, SparseLayout, Values, new_message, read
from thinwire.errors import NumericError

LARGEST = torch.finfo(torch.float32).max
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, -2.0, 0.1, -LARGEST]) | st.integers(-99, 99).map(
    (0.1).__mul__
)
# Around the blocks of the kernels.
SIZES = st.sampled_from([1, 2, 3, 127, 128, 129, 300, 2048, 2049, 4100])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@st.composite
def inputs(draw: st.DrawFn) -> Callable[[str], tuple[Tensor, Tensor]]:
    """Makes on a device a gradient of some dtype, perhaps strided, and a residual; both of a few numbers."""
    numel, dtype, stride = draw(SIZES), draw(DTYPES), draw(st.integers(1, 3))
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def repeated(length: int, dtype: torch.dtype) -> Tensor:
        few = torch.tensor(draw(st.lists(NUMBERS, min_size=1, max_size=13)), dtype=torch.float64)
        return few.repeat(math.ceil(length / len(few)))[:length].to(dtype)

    # Triton's interpreter takes subnormal bfloat16 for zeros, so only the residual has such numbers.
    residual = repeated(numel, wide)
    residual[::11] = draw(st.sampled_from([0.0, 1e-40, residual[0].item()]))
    gradient = repeated(numel * stride, dtype)
    return lambda device: (gradient.to(device)[::stride], residual.clone().to(device))


def sums(gradient: Tensor, residual: Tensor) -> list[float]:
    added: list[float] = (residual + gradient.to(residual.dtype)).tolist()
    return added


def selected(
    gradient: Tensor, residual: Tensor, threshold: float, message: Tensor, layout: SparseLayout
) -> Sparse:
    select_(gradient, residual, threshold, message, layout)
    return read(message, layout)


def on_wire(value: float, values: Values) -> float:
    if values == "fp32":
        return value
    largest = torch.finfo(torch.bfloat16).max
    return float(torch.tensor(min(max(value, -largest), largest), dtype=torch.float64).bfloat16())


def check(
    message: Tensor, layout: SparseLayout, residual: Tensor, all_: list[float], chosen: list[int]
) -> None:
    """The message holds the chosen ones, and the residual what is left of all."""
    entries = read(message, layout)
    assert entries.index.tolist() == chosen
    assert entries.value.tolist() == [on_wire(all_[i], layout.values) for i in chosen]
    left = list(all_)
    for i in chosen:
        left[i] -= on_wire(all_[i], layout.values)
    assert residual.tolist() == pytest.approx(left, rel=1e-7, abs=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@given(
    make=inputs(),
    threshold=st.sampled_from([0.0, 0.1, 1.0, 1.5, 3.0]),
    capacity=st.sampled_from([1, 7, 5000]),
)
@settings(max_examples=25)
def test_what_is_above_the_threshold_moves_as_far_as_there_is_room(
    kind: str, values: Values, make: Callable[[str], tuple[Tensor, Tensor]], threshold: float, capacity: int
) -> None:
    with using(kind) as device:
        gradient, residual = make(device)
        before, all_ = gradient.clone(), sums(gradient, residual)
        layout = SparseLayout(capacity=capacity, values=values, itemsize=residual.itemsize)
        message = new_message(layout, residual)
        if not all(map(math.isfinite, all_)):
            with pytest.raises(NumericError):
                selected(gradient, residual, threshold, message, layout)
            return
        select_(gradient, residual, threshold, message, layout)
        limit = float(torch.tensor(threshold))
        above = [i for i, number in enumerate(all_) if abs(number) > limit]
        check(message, layout, residual, all_, above[:capacity])
        assert int(message[PASSED]) == len(above)
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("kind", KINDS)
@given(make=inputs(), k=st.sampled_from([1, 2, 5, 300, 5000]), values=st.sampled_from(["fp32", "bf16"]))
@settings(max_examples=25)
def test_exactly_the_k_largest_ties_by_lower_index(
    kind: str, make: Callable[[str], tuple[Tensor, Tensor]], k: int, values: Values
) -> None:
    with using(kind) as device, patch.object(select, "_SAMPLE", 128):  # so that these are guessed, too
        gradient, residual = make(device)
        all_ = sums(gradient, residual)
        layout = SparseLayout(capacity=k, values=values, itemsize=residual.itemsize)
        message = new_message(layout, residual)
        if not all(map(math.isfinite, all_)):
            select_largest_(gradient, residual, k, message, layout)
            with pytest.raises(NumericError):
                read(message, layout)
            return
        select_largest_(gradient, residual, k, message, layout)
        largest = sorted(range(len(all_)), key=lambda i: (-abs(all_[i]), i))[:k]
        check(message, layout, residual, all_, sorted(largest))


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_guess_is_as_exact_as_a_poor_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with using(kind) as device, patch.object(select, "_SAMPLE", 1000):
        gradient, residual = torch.randn(2, 20_000, generator=generator).to(device)
        largest = (gradient + residual).abs().topk(100).indices.sort().values
        layout = SparseLayout(capacity=100)
        message = new_message(layout, residual)
        with patch.object(select, "largest_mask", side_effect=AssertionError("looked at everything")):
            select_largest_(gradient, residual, 100, message, layout)
        assert read(message, layout).index.tolist() == largest.tolist()


def test_a_gradient_that_has_to_be_converted_is_so_in_parts() -> None:
    cpu = pytest.importorskip("thinwire.compress.cpu")
    generator = torch.Generator().manual_seed(0)
    gradient, residual = torch.randn(1000, generator=generator).bfloat16(), torch.zeros(1000)
    layout = SparseLayout(capacity=150)
    message = new_message(layout, residual)
    with patch.object(cpu, "_CHUNK", 300):
        select_(gradient, residual, 1.0, message, layout)
    above = (gradient.abs() > 1).nonzero().view(-1)
    assert above.numel() > 150 == int(message[COUNT])
    assert int(message[PASSED]) == above.numel()
    assert read(message, layout).index.tolist() == above[:150].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name(kind: str, bad: float) -> None:
    with using(kind) as device:
        gradient = torch.zeros(5000, device=device)
        gradient[2500] = bad
        layout = SparseLayout(capacity=10)
        message = new_message(layout, gradient)
        for exactly in (True, False):
            residual = torch.zeros_like(gradient)
            message.zero_()
            if exactly:
                select_largest_(gradient, residual, 9, message, layout)
            else:
                select_(gradient, residual, 1.0, message, layout)
            with pytest.raises(NumericError, match="layer 5 is"):
                refuse(residual, lambda i: f"layer {i // 500}")
            with pytest.raises(NumericError, match="a worker met NaN"):  # also where it is sent to
                read(message, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_over_many_steps_nothing_is_lost(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with using(kind) as device:
        layout = SparseLayout(capacity=40, values="bf16", itemsize=8)
        residual = torch.zeros(3000, dtype=torch.float64, device=device)
        message = new_message(layout, residual)
        fed, sent = torch.zeros_like(residual), torch.zeros_like(residual)
        for _ in range(8):
            gradient = torch.randn(3000, generator=generator, dtype=torch.float64).to(device)
            select_(gradient, residual, 3.0, message, layout)
            fed += gradient
            entries: Sparse = read(message, layout)
            sent[entries.index] += entries.value
        torch.testing.assert_close(fed, sent + residual, rtol=1e-12, atol=1e-12)
        assert sent.count_nonzero() > 100


def test_without_numba_it_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            prepare(torch.zeros(1))
            prepare(torch.zeros(1))
    finally:
        kernels._load.cache_clear()
    assert [r.message for r in caplog.records if "numba" in r.message and "thinwire[kernels]" in r.message]
    assert len(caplog.records) == 1


_REPLACED = """
import builtins, logging
import torch

def setup_for_distributed():  # as torchvision's references do
    builtin_print = builtins.print
    def print(*args, force=False, **kwargs):
        builtin_print(*args, **kwargs)
    builtins.print = print

setup_for_distributed()
logging.basicConfig(format="%(message)s")
from thinwire.compress.select import prepare
from thinwire.compress.kernels import cpu_kernels
prepare(torch.ones(3))
print("kernels:", cpu_kernels(torch.ones(3)))
"""


def test_a_replaced_print_costs_speed_and_nothing_else() -> None:
    """Numba cannot be imported then."""
    ran = subprocess.run(
        [sys.executable, "-c", _REPLACED], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "kernels: None\n"
    [said] = ran.stderr.splitlines()
    assert said.startswith("selecting gradients in plain torch")
    assert said.endswith("import numba first thing in the script")
