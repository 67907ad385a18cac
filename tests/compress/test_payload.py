"""Payloads: sizes as stated, both ends the same bits, errors bounded and not lost."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compress.payload import BLOCK, ChangePayload, Payload, decode, encode_, payload_bytes

PAYLOADS: tuple[Payload, ...] = get_args(Payload)


def numbers(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there_and_back(data: Tensor, payload: ChangePayload, **kept: Tensor) -> Tensor:
    message = torch.empty(payload_bytes(payload, data.numel(), data.element_size()), dtype=torch.uint8)
    shown = encode_(message, data, payload, **kept)
    kept.pop("error", None)
    seen = decode(message, payload, data, **kept)
    assert torch.equal(seen, shown)
    return seen


@given(
    numel=st.integers(1, 3 * BLOCK),
    payload=st.sampled_from(PAYLOADS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_error_is_bounded(numel: int, payload: Payload, dtype: torch.dtype) -> None:
    data = numbers(numel, dtype=dtype)
    error = (there_and_back(data, payload) - data).abs().double()
    if payload == "fp32":
        assert not error.any()
    elif payload == "bf16":
        assert (error <= data.abs().double() * 2**-8).all()
    else:
        steps = 2 if dtype == torch.bfloat16 else 0.51  # bfloat16 cannot even hold 8 bits and a sign
        for block, lost in zip(data.double().split(BLOCK), error.split(BLOCK), strict=True):
            assert lost.max() <= steps * block.abs().max() / 127


def test_int8_spends_its_steps_on_the_difference_to_the_reference() -> None:
    reference = numbers(5000)
    data = reference + 1e-4 * numbers(5000, seed=1)
    alone = there_and_back(data, "int8") - data
    beside = there_and_back(data, "int8", reference=reference) - data
    assert beside.abs().max() < 5e-6 < alone.abs().max()


def test_int8_keeps_its_error_and_sends_it_later() -> None:
    data, error = numbers(1000), torch.zeros(1000)
    data[0] = 100.0  # so the steps of its block are coarse
    sums = torch.zeros(1000, dtype=torch.float64)
    for times in range(1, 201):
        sums += there_and_back(data, "int8", error=error)
        assert torch.allclose(sums + error, times * data.double(), atol=1e-3)
    assert (sums / 200 - data).abs().max() < 0.01
    assert (there_and_back(data, "int8") - data).abs().max() > 0.1


@pytest.mark.parametrize("payload", PAYLOADS)
def test_zeros_stay_zeros(payload: Payload) -> None:
    assert not there_and_back(torch.zeros(700), payload).any()


def test_several_payloads_fit_into_one_message() -> None:
    """The second begins where the first ends, wherever that is."""
    first, second = numbers(333), numbers(77, seed=1)
    sizes = [payload_bytes("int8", 333, 4), payload_bytes("fp32", 77, 4)]
    message = torch.empty(sum(sizes), dtype=torch.uint8)
    encode_(message[: sizes[0]], first, "int8")
    encode_(message[sizes[0] :], second, "fp32")
    assert torch.equal(decode(message[sizes[0] :], "fp32", second), second)
    assert (decode(message[: sizes[0]], "int8", first) - first).abs().max() < 0.03


@given(numel=st.integers(1, 3 * BLOCK), payload=st.sampled_from(get_args(ChangePayload)))
def test_rows_are_the_same_as_each_alone(numel: int, payload: ChangePayload) -> None:
    rows = numbers(3 * numel).view(3, numel)
    messages = torch.empty((3, payload_bytes(payload, numel, 4)), dtype=torch.uint8)
    shown = encode_(messages, rows, payload)
    assert torch.equal(decode(messages, payload, rows[0]), shown)
    for row, seen in zip(rows, shown, strict=True):
        assert torch.equal(there_and_back(row, payload), seen)
