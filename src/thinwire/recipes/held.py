"""Training data of which every worker keeps only a part: what `--shuffle own` and `ring` ask for."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from thinwire.data import ShuffleRing
from thinwire.engine.link import Link
from thinwire.errors import SettingError, UsageError
from thinwire.recipes.base import Data, Samples
from thinwire.recipes.config import RunConfig
from thinwire.recipes.joined import Peers


def hold(data: Data, rank: int, world_size: int) -> Data:
    """`data` with a copy of one worker's block of the training samples, so that the rest can be forgotten."""
    block = block_of(data, rank, world_size)
    tensors = tensors_of(data.train)
    own = {name: tensor[block.start : block.stop].clone() for name, tensor in tensors.items()}
    samples: Any = data.train
    return replace(data, train=replace(samples, **own))


def block_of(data: Data, rank: int, world_size: int) -> range:
    """The samples that a worker holds at first: blocks in the order of the data, equal but for one."""
    if data.order == "streams":
        raise SettingError(
            "shuffle must be 'dealt' for a text that is read in streams: its pieces stand in order",
            hint="leave --shuffle out, or train text-transformer",
        )
    count = len(data.train)
    return range(rank * count // world_size, (rank + 1) * count // world_size)


def tensors_of(samples: Samples) -> dict[str, Tensor]:
    """The tensors that hold the samples, by name; each has one row per sample."""
    holder: Any = samples
    values = {f.name: getattr(holder, f.name) for f in fields(holder)} if is_dataclass(holder) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors or any(len(tensor) != len(samples) for tensor in tensors.values()):
        raise SettingError(
            f"shuffle must be 'dealt' for samples of type {type(samples).__name__}",
            hint="own and ring need a dataclass whose tensors have one row per sample",
        )
    return tensors


def ring_of(data: Data, config: RunConfig, peers: Peers) -> ShuffleRing:
    """The ring through which the samples held by this worker and its peers wander."""
    if not isinstance(peers, Link):
        raise UsageError("samples travel through a link; this run was joined by another system")
    return ShuffleRing(*tensors_of(data.train).values(), link=peers, seed=config.seed)
