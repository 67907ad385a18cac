"""One bucket's message: its parameters, and the optimizer's averages of their gradients, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.payload import Payload, decode, encode_, payload_bytes
from thinwire.strategies.gossip.chunks import Span


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A span of the parameters (value 0) or of the optimizer's averages (value 1, ...), and its bytes."""

    value: int
    start: int
    stop: int
    payload: Payload
    begin: int
    end: int


@dataclass(slots=True)
class RoundingMemory:
    """int8 sends differences to weights that all workers once had in common, and adds rounding errors to the
    next message; both by bucket, empty where they are not needed."""

    references: list[Tensor]
    errors: list[Tensor]

    def of(self, bucket: int, part: MessagePart) -> tuple[Tensor | None, Tensor | None]:
        """Reference and error of a part; none for payloads that need none."""
        if part.payload != "int8":
            return None, None
        span = slice(part.start, part.stop)
        return self.references[bucket][span], self.errors[bucket][span] if self.errors else None


class Encoding:
    """The layout of a bucket's message; the same at both ends."""

    def __init__(self, spans: Sequence[Span], itemsize: int, payload: Payload, momenta: int) -> None:
        self.parts: list[MessagePart] = []
        end = 0
        for value in range(1 + momenta):
            # Adam's second moment may not become negative, which rounding to a step of int8 could make it
            own: Payload = "bf16" if payload == "int8" and value > 0 else payload
            for start, stop in spans:
                begin, end = end, end + payload_bytes(own, stop - start, itemsize)
                self.parts.append(MessagePart(value, start, stop, own, begin, end))
        self.num_bytes = end

    def write(
        self, bucket: int, own: Sequence[Tensor], memory: RoundingMemory
    ) -> tuple[Tensor, list[Tensor]]:
        """Gives the message of a worker's own parts, and these as the other end will see them."""
        message = torch.empty(self.num_bytes, dtype=torch.uint8, device=own[0].device)
        sent = []
        for part, data in zip(self.parts, own, strict=True):
            reference, error = memory.of(bucket, part)
            bytes_ = message[part.begin : part.end]
            sent.append(encode_(bytes_, data, part.payload, reference=reference, error=error))
        return message, sent

    def read(
        self, bucket: int, message: Tensor, likes: Sequence[Tensor], memory: RoundingMemory
    ) -> list[Tensor]:
        """Gives the parts of a message; `likes` are tensors of the parts' sizes and dtype."""
        return [
            decode(message[part.begin : part.end], part.payload, like, reference=memory.of(bucket, part)[0])
            for part, like in zip(self.parts, likes, strict=True)
        ]

    def spread(self, parts: Sequence[Tensor], numel: int) -> Tensor:
        """The parts as one flat tensor of the whole bucket, zero where it has nothing."""
        if len(parts) == 1 and parts[0].numel() == numel:
            return parts[0]
        flat = parts[0].new_zeros(numel)
        for part, data in zip(self.parts, parts, strict=True):
            flat[part.start : part.stop] = data
        return flat
