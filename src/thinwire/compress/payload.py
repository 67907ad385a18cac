"""Numbers as bytes of a message, and back: as they are, as bfloat16, or in few bits with scales.

Few bits (int8, int4 and sign) can carry the difference to a `reference` that both ends hold, so that their
few steps are spent on what the other end does not know; and they can keep the rounding `error` and add it to
what is sent next, so that over several messages nothing is lost that was too small for one.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

Payload = Literal["fp32", "bf16", "int8"]
"""Payloads, the finest first. "fp32" leaves numbers as they are, whatever the model's dtype is."""
ChangePayload = Literal["fp32", "bf16", "int8", "int4", "sign"]
"""Payloads for changes, whose rounding error can be sent later; parameters themselves want more bits. "sign"
is one bit, and the mean size of a block."""

BLOCK = 512
"""Numbers that share one scale in int8, int4 and sign."""
SCALE_BYTES = 4
ALIGN_BYTES = 8
"""A payload takes a multiple of this, so that several of them in one message can be read in place."""
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "sign": 1}
_LARGEST = {"int8": 127, "int4": 7}
_GATHER = 0x0102040810204080
"""Eight bytes that are 0 or 1, times this: the highest byte has them as its bits, the first the lowest."""


def bits(payload: ChangePayload) -> int:
    """Bits of one number, scales left out."""
    return _BITS[payload]


def payload_bytes(payload: ChangePayload, numel: int, itemsize: int) -> int:
    """Bytes that `numel` numbers of `itemsize` bytes become.

    >>> payload_bytes("fp32", 1000, 4), payload_bytes("bf16", 1000, 4), payload_bytes("int8", 1000, 4)
    (4000, 2000, 1008)
    """
    if payload in ("fp32", "bf16"):
        num_bytes = numel * (itemsize if payload == "fp32" else 2)
    else:
        num_bytes = _code_bytes(payload, numel) + SCALE_BYTES * num_blocks(numel)
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _code_bytes(payload: ChangePayload, numel: int) -> int:
    return -(-numel * bits(payload) // 8)


def num_blocks(numel: int) -> int:
    """Number of scales that `numel` numbers need."""
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
    """Overwrite `message` with `data`; with few bits leave in `error` what was lost this time.

    Messages and data may be rows, each on its own. Gives the numbers as the other end will see them.
    """
    if data.is_meta:
        return data  # sizes alone, without numbers
    numel = data.shape[-1]
    if payload == "fp32":
        message[..., : numel * data.element_size()].copy_(data.view(torch.uint8))
        return data
    if payload == "bf16":
        return message[..., : 2 * numel].view(torch.bfloat16).copy_(data).to(data.dtype)
    wanted = data.new_empty((*data.shape[:-1], num_blocks(numel) * BLOCK))
    wanted[..., numel:] = 0
    flat = wanted[..., :numel]
    if reference is None:
        flat.copy_(data)
    else:
        torch.sub(data, reference, out=flat)
    if error is not None:
        flat += error
    scales, codes = _parts(message, numel, payload)
    blocks = wanted.unflatten(-1, (-1, BLOCK))
    if payload == "sign":
        shown = _write_signs(scales, codes, blocks, numel)
    else:
        shown = _write_steps(scales, codes, blocks, _LARGEST[payload])
    shown = shown.flatten(-2)[..., :numel]
    if error is not None:
        torch.sub(flat, shown, out=error)
    return shown if reference is None else shown.add_(reference)


@torch.no_grad()
def decode(
    message: Tensor, payload: ChangePayload, like: Tensor, *, reference: Tensor | None = None
) -> Tensor:
    """The numbers in `message`, as many and of the same dtype as `like`, or a row of them for each row of
    messages; both ends get the same bits."""
    numel, rows = like.numel(), message.shape[:-1]
    if message.is_meta:
        return like.new_empty((*rows, numel))
    if payload == "fp32":
        return message[..., : like.nbytes].view(like.dtype)
    if payload == "bf16":
        return message[..., : 2 * numel].view(torch.bfloat16).to(like.dtype)
    scales, codes = _parts(message, numel, payload)
    padded = like.new_empty((*rows, scales.shape[-1] * BLOCK))
    data, num_codes = padded[..., :numel], codes.shape[-1]
    if payload == "int8":
        data.copy_(codes)
    elif payload == "int4":  # the sign of a half byte comes from its highest bit
        pairs = padded.unflatten(-1, (-1, 2))[..., :num_codes, :]
        pairs[..., 0] = (codes << 4) >> 4
        pairs[..., 1] = codes >> 4
    else:
        signs = _sign_table(like.dtype, like.device)[codes.view(torch.uint8).int()]
        padded.unflatten(-1, (-1, 8))[..., :num_codes, :] = signs
    padded.unflatten(-1, (-1, BLOCK)).mul_(scales.to(like.dtype)[..., None])
    return data if reference is None else data.add_(reference)


def _write_steps(scales: Tensor, codes: Tensor, blocks: Tensor, largest: int) -> Tensor:
    """Whole numbers of steps, of which the largest number of a block has `largest`."""
    # Not linalg.vector_norm, which takes longer than all the rest together.
    scales.copy_(torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / largest)
    steps = scales.to(blocks.dtype)[..., None]
    # A block of zeros has scale 0; whatever it is divided by, its codes are 0.
    rounded = (blocks / steps.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-largest, largest)
    values, num_codes = rounded.flatten(-2), codes.shape[-1]
    if largest == _LARGEST["int8"]:
        codes.copy_(values[..., :num_codes])
    else:  # two in a byte
        pairs = values.unflatten(-1, (-1, 2))[..., :num_codes, :].to(torch.int8)
        codes.copy_((pairs[..., 0] & 15) | (pairs[..., 1] << 4))
    return rounded.mul_(steps)


def _write_signs(scales: Tensor, codes: Tensor, blocks: Tensor, numel: int) -> Tensor:
    """Eight signs in a byte, and the mean size of a block, of its numbers alone where it is not full."""
    sizes = blocks.abs().sum(-1).div_(BLOCK)
    sizes[..., -1:] *= BLOCK / (numel - BLOCK * (sizes.shape[-1] - 1))
    scales.copy_(sizes)
    positive = blocks >= 0
    packed = positive.flatten(-2).view(torch.int64).mul(_GATHER) >> 56
    codes.view(torch.uint8).copy_(packed[..., : codes.shape[-1]].bitwise_and_(255))
    return torch.where(positive, 1.0, -1.0).to(blocks.dtype).mul_(scales.to(blocks.dtype)[..., None])


@functools.cache
def _sign_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The signs that each byte stands for."""
    codes = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return ((codes & 1) * 2 - 1).to(dtype)


def _parts(message: Tensor, numel: int, payload: ChangePayload) -> tuple[Tensor, Tensor]:
    codes_at = SCALE_BYTES * num_blocks(numel)
    assert message.shape[-1] == payload_bytes(payload, numel, 1), "a message of another size"
    codes = message[..., codes_at : codes_at + _code_bytes(payload, numel)]
    return message[..., :codes_at].view(torch.float32), codes.view(torch.int8)
