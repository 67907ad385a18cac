"""Numbers as bytes of a message, and back: as they are, as bfloat16, or as int8 with a scale per block.

int8 can carry the difference to a `reference` that both ends hold, so that its few steps are spent on what
the other end does not know; and it can keep the rounding `error` and add it to what is sent next, so that
over several messages nothing is lost that was too small for one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Payload = Literal["fp32", "bf16", "int8"]
"""From the finest to the coarsest. "fp32" leaves numbers as they are, whatever the model's dtype is."""

BLOCK = 512
"""Numbers that share one scale in int8."""
SCALE_BYTES = 4
ALIGN_BYTES = 8
"""A payload takes a multiple of this, so that several of them in one message can be read in place."""
_LARGEST = 127


def bits(payload: Payload) -> int:
    """Of one number, scales left out."""
    return {"fp32": 32, "bf16": 16, "int8": 8}[payload]


def payload_bytes(payload: Payload, numel: int, itemsize: int) -> int:
    """Bytes that `numel` numbers of `itemsize` bytes become.

    >>> payload_bytes("fp32", 1000, 4), payload_bytes("bf16", 1000, 4), payload_bytes("int8", 1000, 4)
    (4000, 2000, 1008)
    """
    if payload == "int8":
        num_bytes = numel + SCALE_BYTES * num_blocks(numel)
    else:
        num_bytes = numel * (itemsize if payload == "fp32" else 2)
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def num_blocks(numel: int) -> int:
    """Scales that int8 needs."""
    return -(-numel // BLOCK)


@torch.no_grad()
def encode_(
    message: Tensor,
    data: Tensor,
    payload: Payload,
    *,
    reference: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """Overwrite `message` with `data`; with int8 leave in `error` what was lost this time.

    Gives the numbers as the other end will see them.
    """
    numel = data.numel()
    if data.is_meta:
        return data  # sizes alone, without numbers
    if payload == "fp32":
        message[: data.nbytes].copy_(data.view(torch.uint8))
        return data
    if payload == "bf16":
        return message[: 2 * numel].view(torch.bfloat16).copy_(data).to(data.dtype)
    wanted = data.new_empty(num_blocks(numel) * BLOCK)
    wanted[numel:] = 0
    flat = wanted[:numel]
    if reference is None:
        flat.copy_(data)
    else:
        torch.sub(data, reference, out=flat)
    if error is not None:
        flat += error
    scales, codes = _int8_parts(message, numel)
    blocks = wanted.view(-1, BLOCK)
    # Not linalg.vector_norm, which takes longer than all the rest together.
    scales.copy_(torch.maximum(blocks.amax(1), -blocks.amin(1)) / _LARGEST)
    steps = scales.to(data.dtype)[:, None]
    # A block of zeros has scale 0; whatever it is divided by, its codes are 0.
    rounded = (blocks / steps.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-_LARGEST, _LARGEST)
    codes.copy_(rounded.view(-1)[:numel])
    shown = rounded.mul_(steps).view(-1)[:numel]
    if error is not None:
        torch.sub(flat, shown, out=error)
    return shown if reference is None else shown.add_(reference)


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
    scales, codes = _int8_parts(message, numel)
    padded = like.new_empty(scales.numel() * BLOCK)
    data = padded[:numel].copy_(codes)
    padded.view(-1, BLOCK).mul_(scales.to(like.dtype)[:, None])
    return data if reference is None else data.add_(reference)


def _int8_parts(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    codes_at = SCALE_BYTES * num_blocks(numel)
    assert message.numel() == payload_bytes("int8", numel, 1), "a message of another size"
    return message[:codes_at].view(torch.float32), message[codes_at : codes_at + numel].view(torch.int8)
