"""Parts of a checkpoint that thinwire brings along: random numbers, buffers, replicas that differ.

A part is anything with `state_dict` and `load_state_dict`. One that also has `resize` is different on every
worker: each saves its own, and `resize` makes one worker's out of those of another number of workers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Part(Protocol):
    """The same on all workers; rank 0's is saved."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class OwnPart(Part, Protocol):
    """Every worker has its own, and all are saved."""

    def resize(self, saved: Sequence[dict[str, Any]], /) -> None:
        """Load this worker's share of what another number of workers saved."""


@dataclass(frozen=True, slots=True)
class Random:
    """The generators of Python, NumPy and torch, also those of the GPUs the model is on."""

    model: nn.Module
    rank: int

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in self._gpus()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all generators; GPUs that were not there keep theirs."""
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        for device, state in zip(self._gpus(), saved["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on with this rank's generators; a rank that is new gets ones that nobody else has."""
        if self.rank < len(saved):
            self.load_state_dict(saved[self.rank])
            return
        noise = saved[0]["torch"].numpy().tobytes() + self.rank.to_bytes(8, "big")
        seed = int.from_bytes(hashlib.sha256(noise).digest()[:4], "big")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def _gpus(self) -> list[torch.device]:
        devices = {p.device for p in self.model.parameters() if p.device.type == "cuda"}
        return sorted(devices, key=lambda device: device.index or 0)


@dataclass(frozen=True, slots=True)
class OwnBuffers:
    """The buffers in the model's state dict (batch-norm statistics), which may differ by worker."""

    model: nn.Module
    rank: int

    def state_dict(self) -> dict[str, Tensor]:
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, buffer in self.state_dict().items():
            buffer.copy_(saved[name])

    def resize(self, saved: Sequence[dict[str, Tensor]]) -> None:
        """This rank's, or rank 0's."""
        self.load_state_dict(saved[self.rank if self.rank < len(saved) else 0])


@dataclass(frozen=True, slots=True)
class Replica:
    """Model and optimizer of a worker, under a strategy that lets them differ."""

    model: nn.Module
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """All go on from the mean, which is what a user would keep of replicas that differ."""
        self.load_state_dict(mean(saved))


def mean(values: Sequence[Any]) -> Any:
    """The mean of trees of one shape, taken of floating-point tensors; of anything else the first."""
    first = values[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        return reduce(add, values) / len(values)
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean(entries) for entries in zip(*values, strict=True)]
    return first
