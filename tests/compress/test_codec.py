"""Codecs: both ends see the same bits, and what is not seen is known to the sender."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.compress.codec import CHUNK, FEW, Codec, Dense, Largest

CODECS: list[Codec] = [
    Largest(1),
    Largest(8),
    Dense("sign"),
    Dense("int4"),
    Dense("int8"),
    Dense("bf16"),
    Dense("fp32"),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def encoded(codec: Codec, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    messages = torch.empty(len(data), codec.num_bytes(data.shape[1], data.element_size()), dtype=torch.uint8)
    return messages, codec.encode_(messages, data)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), chunks=st.integers(1, 5), power=st.integers(-30, 8))
@settings(max_examples=25, deadline=None)
def test_both_ends_see_the_same_bits(
    codec: Codec, dtype: torch.dtype, seed: int, rows: int, chunks: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, chunks * CHUNK, generator=generator, dtype=dtype) * 10.0**power
    messages, shown = encoded(codec, data)
    assert torch.equal(codec.decode(messages, data[0]), shown)
    assert (data - shown).norm() <= data.norm()


@every_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    messages, shown = encoded(codec, torch.zeros(2, CHUNK))
    assert not shown.any()
    assert not codec.decode(messages, shown[0]).any()


def test_the_largest_of_every_chunk_are_shown() -> None:
    data = torch.randn(3, 2 * CHUNK, generator=torch.Generator().manual_seed(0))
    _, shown = encoded(Largest(8), data)
    for chunk, seen in zip(data.view(-1, CHUNK), shown.view(-1, CHUNK), strict=True):
        assert set(chunk.abs().topk(8).indices.tolist()) == set(seen.nonzero().view(-1).tolist())
        kept = seen != 0
        assert (seen - chunk)[kept].abs().max() <= chunk.abs().max() / 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_and_plain_find_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(4, 3 * CHUNK, generator=torch.Generator().manual_seed(5), dtype=dtype)
    data[1, :CHUNK] = 0.0
    for count in (1, 8, FEW):
        compiled = encoded(Largest(count), data)[1]
        with monkeypatch.context() as patch:
            patch.setattr("thinwire.compress.codec.cpu_kernels", lambda like: None)
            assert torch.equal(encoded(Largest(count), data)[1], compiled)


def test_four_bits_keep_both_numbers_of_a_byte() -> None:
    data = torch.tensor([[-7.0, 7.0, 3.0, -3.0, 0.0, 1.0, -1.0]])
    _, shown = encoded(Dense("int4"), data)
    assert torch.equal(shown, data)


@every_codec
def test_over_several_messages_nothing_is_lost(codec: Codec) -> None:
    meant = torch.randn(1, CHUNK, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    waiting, arrived = torch.zeros_like(meant), torch.zeros_like(meant)
    for _ in range(400):
        waiting += meant / 400
        _, shown = encoded(codec, waiting)
        arrived += shown
        waiting -= shown
    assert torch.allclose(arrived + waiting, meant, atol=1e-12)
    assert waiting.norm() < 0.5 * meant.norm()
