"""Numbers as bytes of a message, and back: as they are, as bfloat16, or as int8 with a scale per block.

int8 can carry the difference to a `reference` that both ends hold, so that its few steps are spent on what
the other end does not know; and it can keep the rounding `error` and add it to what is sent next, so that
over several messages nothing is lost that was too small for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.sizes import BLOCK, SCALE_BYTES, Payload, num_blocks, payload_bytes

_LARGEST = 127


def empty_message(num_bytes: int, like: Tensor) -> Tensor:
    """Bytes on the device of `like`."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)


def on_host(message: Tensor) -> Tensor:
    """On the CPU, where a message can be taken from whoever sends it."""
    return message if message.is_meta else message.cpu()


@torch.no_grad()
def encode_(
    message: Tensor,
    data: Tensor,
    payload: Payload,
    *,
    reference: Tensor | None = None,
    error: Tensor | None = None,
) -> None:
    """Overwrite `message` with `data`; with int8 leave in `error` what was lost this time."""
    numel = data.numel()
    if data.is_meta:
        return  # sizes alone, without numbers
    if payload == "fp32":
        message[: data.nbytes].copy_(data.view(torch.uint8))
    elif payload == "bf16":
        message[: 2 * numel].view(torch.bfloat16).copy_(data)
    else:
        wanted = data.new_zeros(num_blocks(numel) * BLOCK)
        flat = wanted[:numel].copy_(data)
        if reference is not None:
            flat -= reference
        if error is not None:
            flat += error
        scales, codes = _int8_parts(message, numel)
        blocks = wanted.view(-1, BLOCK)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        scales.copy_(largest / _LARGEST)
        # A block of zeros has scale 0; whatever it is divided by, its codes are 0.
        rounded = blocks / scales.to(data.dtype).clamp_(min=torch.finfo(torch.float32).tiny)[:, None]
        codes.copy_(rounded.round_().clamp_(-_LARGEST, _LARGEST).view(-1)[:numel])
        if error is not None:
            torch.sub(flat, _from_int8(scales, codes, data), out=error)


@torch.no_grad()
def decode(message: Tensor, payload: Payload, like: Tensor, *, reference: Tensor | None = None) -> Tensor:
    """The numbers in `message`, as many and of the same dtype as `like`; both ends get the same bits."""
    numel = like.numel()
    if message.is_meta:
        return torch.empty_like(like)
    if payload == "fp32":
        return message[: like.nbytes].view(like.dtype)
    if payload == "bf16":
        return message[: 2 * numel].view(torch.bfloat16).to(like.dtype)
    data = _from_int8(*_int8_parts(message, numel), like)
    return data if reference is None else data.add_(reference)


def _int8_parts(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    codes_at = SCALE_BYTES * num_blocks(numel)
    assert message.numel() == payload_bytes("int8", numel, 1), "a message of another size"
    return message[:codes_at].view(torch.float32), message[codes_at : codes_at + numel].view(torch.int8)


def _from_int8(scales: Tensor, codes: Tensor, like: Tensor) -> Tensor:
    data = like.new_zeros(scales.numel() * BLOCK)
    data[: codes.numel()].copy_(codes)
    data.view(-1, BLOCK).mul_(scales.to(like.dtype)[:, None])
    return data[: codes.numel()]


def plain(numbers: Sequence[float]) -> Tensor:
    """A few numbers as they are, on the CPU."""
    return torch.tensor(numbers, dtype=torch.float64)
