"""What a payload takes on the wire, from sizes alone; no torch."""

from __future__ import annotations

from typing import Literal

Payload = Literal["fp32", "bf16", "int8"]
"""From the finest to the coarsest. "fp32" leaves numbers as they are, whatever the model's dtype is."""

BLOCK = 512
"""Numbers that share one scale in int8."""
SCALE_BYTES = 4
ALIGN_BYTES = 8
"""A payload takes a multiple of this, so that several of them in one message can be read in place."""


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
