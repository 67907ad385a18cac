"""Training data of which every worker keeps only its own part, as `--shuffle own` and `ring` ask for."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data import ShuffleRing
from thinwire.data.ring import SampleExchange, Start
from thinwire.data.sample_table import SampleTable
from thinwire.engine.link import Link
from thinwire.errors import SettingError, UsageError
from thinwire.recipes.base import Data, Samples
from thinwire.recipes.setup import LinkLike
from thinwire.wire.base import Lane

INDEX_BYTES = 8


def own_part(data: Data, rank: int, world_size: int) -> Data:
    """Return `data` with a copy of one worker's block of the training samples, so that the rest is freed."""
    block = block_range(data, rank, world_size)
    tensors = sample_tensors(data.train)
    own = {name: tensor[block.start : block.stop].clone() for name, tensor in tensors.items()}
    samples: Any = data.train
    return replace(data, train=replace(samples, **own))


def block_range(data: Data, rank: int, world_size: int) -> range:
    """Return the samples a worker holds at first: blocks in the order of the data, of nearly equal size."""
    if data.order == "streams":
        raise SettingError(
            "shuffle must be 'dealt' for a text that is read in streams: its pieces stand in order",
            hint="leave --shuffle out, or train text-transformer",
        )
    count = len(data.train)
    return range(rank * count // world_size, (rank + 1) * count // world_size)


def sample_tensors(samples: Samples) -> dict[str, Tensor]:
    """Return the tensors that hold the samples, by field name; each has one row per sample."""
    holder: Any = samples
    values = {f.name: getattr(holder, f.name) for f in fields(holder)} if is_dataclass(holder) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors or any(len(tensor) != len(samples) for tensor in tensors.values()):
        raise SettingError(
            f"shuffle must be 'dealt' for samples of type {type(samples).__name__}",
            hint="own and ring need a dataclass whose tensors have one row per sample",
        )
    return tensors


def shuffle_ring(data: Data, seed: int, link: LinkLike) -> ShuffleRing:
    """Make the ring through which the samples of all workers travel."""
    if not isinstance(link, Link):
        raise UsageError("samples travel through a link; this run was attached by another system")
    return ShuffleRing(*sample_tensors(data.train).values(), link=link, seed=seed)


class VirtualRing:
    """One worker's shuffle ring on the virtual clock. Only a sample's index travels, padded to its size."""

    def __init__(self, data: Data, seed: int, lane: Lane, start: Start) -> None:
        blocks = [block_range(data, rank, lane.world_size) for rank in range(lane.world_size)]
        own = blocks[lane.rank]
        num_bytes = sum(tensor[0].nbytes for tensor in sample_tensors(data.train).values())
        self._rows = torch.zeros(len(own), max(INDEX_BYTES, num_bytes), dtype=torch.uint8)
        self._rows[:, :INDEX_BYTES] = torch.tensor(own).unsqueeze(1).view(torch.uint8)
        table, counts = SampleTable([self._rows]), [len(block) for block in blocks]
        self.exchange = SampleExchange(table, counts, seed=seed, uneven=False, rank=lane.rank, start=start)

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """Return the indices of the next batch's samples, which have arrived."""
        places = torch.from_numpy(self.exchange.hand_out(batch_size))
        indices: NDArray[np.int64] = self._rows[places, :INDEX_BYTES].view(torch.int64).squeeze(1).numpy()
        return indices
