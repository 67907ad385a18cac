"""Numbers as bytes of a message, and back: as they are, as bfloat16, or as int8 or int4 with scales.

int8 and int4 can carry the difference to a `reference` that both ends hold, so that their few steps are spent
on what the other end does not know; and they can keep the rounding `error` and add it to what is sent next,
so that over several messages nothing is lost that was too small for one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Payload = Literal["fp32", "bf16", "int8"]
"""From the finest to the coarsest. "fp32" leaves numbers as they are, whatever the model's dtype is."""
ChangePayload = Literal["fp32", "bf16", "int8", "int4"]
"""For changes, whose rounding error can be sent later; parameters themselves want more bits."""

BLOCK = 512
"""Numbers that share one scale in int8 and int4."""
SCALE_BYTES = 4
ALIGN_BYTES = 8
"""A payload takes a multiple of this, so that several of them in one message can be read in place."""
_LARGEST = {"int8": 127, "int4": 7}


def bits(payload: ChangePayload) -> int:
    """Of one number, scales left out."""
    return {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[payload]


def payload_bytes(payload: ChangePayload, numel: int, itemsize: int) -> int:
    """Bytes that `numel` numbers of `itemsize` bytes become.

    >>> payload_bytes("fp32", 1000, 4), payload_bytes("bf16", 1000, 4), payload_bytes("int8", 1000, 4)
    (4000, 2000, 1008)
    """
    if payload in _LARGEST:
        num_bytes = _code_bytes(payload, numel) + SCALE_BYTES * num_blocks(numel)
    else:
        num_bytes = numel * (itemsize if payload == "fp32" else 2)
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _code_bytes(payload: ChangePayload, numel: int) -> int:
    return numel if payload == "int8" else -(-numel // 2)


def num_blocks(numel: int) -> int:
    """Scales that so many numbers need."""
    return -(-numel // BLOCK)


@torch.no_grad()
def encode_(
    message: Tensor,
    data: Tensor,
    payload: ChangePayload,
    *,
    reference: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """Overwrite `message` with `data`; with int8 and int4 leave in `error` what was lost this time.

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
    scales, codes = _parts(message, numel, payload)
    blocks, largest = wanted.view(-1, BLOCK), _LARGEST[payload]
    # Not linalg.vector_norm, which takes longer than all the rest together.
    scales.copy_(torch.maximum(blocks.amax(1), -blocks.amin(1)) / largest)
    steps = scales.to(data.dtype)[:, None]
    # A block of zeros has scale 0; whatever it is divided by, its codes are 0.
    rounded = (blocks / steps.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-largest, largest)
    if payload == "int8":
        codes.copy_(rounded.view(-1)[:numel])
    else:  # two in a byte
        pairs = rounded.view(-1, 2)[: codes.numel()].to(torch.int8)
        codes.copy_((pairs[:, 0] & 15) | (pairs[:, 1] << 4))
    shown = rounded.mul_(steps).view(-1)[:numel]
    if error is not None:
        torch.sub(flat, shown, out=error)
    return shown if reference is None else shown.add_(reference)


@torch.no_grad()
def decode(
    message: Tensor, payload: ChangePayload, like: Tensor, *, reference: Tensor | None = None
) -> Tensor:
    """The numbers in `message`, as many and of the same dtype as `like`; both ends get the same bits."""
    numel = like.numel()
    if message.is_meta:
        return torch.empty_like(like)
    if payload == "fp32":
        return message[: like.nbytes].view(like.dtype)
    if payload == "bf16":
        return message[: 2 * numel].view(torch.bfloat16).to(like.dtype)
    scales, codes = _parts(message, numel, payload)
    padded = like.new_empty(scales.numel() * BLOCK)
    data = padded[:numel]
    if payload == "int8":
        data.copy_(codes)
    else:  # the sign of a half byte comes from its highest bit
        pairs = padded.view(-1, 2)[: codes.numel()]
        pairs[:, 0] = (codes << 4) >> 4
        pairs[:, 1] = codes >> 4
    padded.view(-1, BLOCK).mul_(scales.to(like.dtype)[:, None])
    return data if reference is None else data.add_(reference)


def _parts(message: Tensor, numel: int, payload: ChangePayload) -> tuple[Tensor, Tensor]:
    codes_at = SCALE_BYTES * num_blocks(numel)
    assert message.numel() == payload_bytes(payload, numel, 1), "a message of another size"
    codes = message[codes_at : codes_at + _code_bytes(payload, numel)]
    return message[:codes_at].view(torch.float32), codes.view(torch.int8)
