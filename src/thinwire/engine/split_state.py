"""Model and optimizer of workers that hold parts of them: saved in parts, joined, and cut anew.

A part of a parameter is a region of it (of a DTensor, what this worker holds) and a flat range of that region
(of strip-owned updates, the strip). So a checkpoint fits any number of workers and groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.buckets import as_gradient, local
from thinwire.engine.replicas import Replicas
from thinwire.engine.sharded_reducer import ShardedReducer
from thinwire.engine.strips import OwnedGroups
from thinwire.errors import DataError
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from thinwire.engine.core import Core

Region = list[list[int]]
"""Begin and end in every dimension."""


def region_of(tensor: Tensor) -> Region:
    """The part of a tensor that this worker holds."""
    if local(tensor) is tensor:
        return [[0, size] for size in tensor.shape]
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [[begin, begin + size] for begin, size in zip(offset, shape, strict=True)]


def _at(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in region)


@dataclass(frozen=True, slots=True)
class SplitReplica:
    """A part of a checkpoint: model and optimizer of which no worker need hold the whole.

    Replicas must agree: a part that several workers hold is saved by the first of them.
    """

    model: nn.Module
    optimizer: Optimizer
    first: Mapping[str, bool]
    """By parameter: whether this worker is the first of those that hold its part."""
    rank: int
    owned: OwnedGroups | None = None
    """The strips of the optimizer's state that this worker owns (`sharded=True`)."""

    @classmethod
    def of(cls, core: Core, optimizer: Optimizer) -> SplitReplica | None:
        """None where every worker holds all of them, or nobody knows which part of what it holds."""
        owned = core.reducer.owned if isinstance(core.reducer, ShardedReducer) else None
        rank = core.lane.rank
        first = {name: rank == 0 for name, _ in core.model.named_parameters()}
        for group in core.groups:
            for bucket in group.buckets:
                if group.ranks is not None and any(local(p) is p for p in bucket.parameters):
                    return None  # by replica_ranks
                first |= dict.fromkeys(bucket.names, group.endpoint.lane.rank == 0)
        if not core.strategy.replicas_agree or (owned is None and not core.has_groups):
            return None
        return cls(core.model, optimizer, first, rank, owned)

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        model = {
            name: _entry(value, local(value))
            for name, value in self.model.state_dict().items()
            if (self.first[name] if name in parameters else self.rank == 0)
        }
        return {
            "model": model,
            "optimizer": [[name, entry] for name, entry in self._optimizer_entries(parameters)],
            "groups": [_settings(group) for group in self.optimizer.param_groups],
        }

    def _optimizer_entries(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, parameter in parameters.items():
            if self.owned is not None and id(parameter) in self.owned.pieces_of:
                for piece, _ in self.owned.pieces_of[id(parameter)]:
                    if piece.parameter in self.optimizer.state:
                        state = self.optimizer.state[piece.parameter]
                        yield name, state_entry(parameter, state, piece.start, piece.stop)
            elif self.first[name] and parameter in self.optimizer.state:
                numel = local(parameter).numel()
                yield name, state_entry(parameter, self.optimizer.state[parameter], 0, numel)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise AssertionError("it is loaded from what all workers saved")

    @torch.no_grad()
    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        for name, value in self.model.state_dict().items():
            whole = _joined([each["model"][name] for each in saved if name in each["model"]], name)
            local(value).copy_(whole[_at(region_of(value))])
        for group, settings in zip(self.optimizer.param_groups, saved[0]["groups"], strict=True):
            group.update(settings)
        entries: dict[str, list[dict[str, Any]]] = {}
        for each in saved:
            for name, entry in each["optimizer"]:
                entries.setdefault(name, []).append(entry)
        for name, parameter in self.model.named_parameters():
            if name in entries:
                self._set_state(parameter, join_state(entries[name], name))

    def _set_state(self, parameter: Tensor, whole: Mapping[str, Any]) -> None:
        mine = {
            key: value[_at(region_of(parameter))] if _fits(value, parameter.shape) else value
            for key, value in whole.items()
        }
        if self.owned is None or id(parameter) not in self.owned.pieces_of:
            self.optimizer.state[parameter] = whole_state(parameter, mine)
            return
        for piece, _ in self.owned.pieces_of[id(parameter)]:
            self.optimizer.state[piece.parameter] = {
                key: value.reshape(-1)[piece.start : piece.stop].clone()
                if _fits(value, local(parameter).shape)
                else _copied(value)
                for key, value in mine.items()
            }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _fits(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _entry(tensor: Tensor, value: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "region": region_of(tensor), "value": value.detach()}


def state_entry(parameter: Tensor, state: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The optimizer's state of a part of a parameter; its tensors flat."""
    flat = {
        key: local(value).reshape(-1) if isinstance(value, Tensor) and value.dim() else value
        for key, value in state.items()
    }
    place = {"shape": list(parameter.shape), "region": region_of(parameter), "range": [start, stop]}
    return {**place, "state": flat}


def join_state(entries: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The optimizer's state of a whole parameter, out of that of its parts."""
    regions: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        regions.setdefault(repr(entry["region"]), []).append(entry)
    found: dict[str, Any] = {}
    for key, example in entries[0]["state"].items():
        if not (isinstance(example, Tensor) and example.dim()):
            found[key] = example
            continue
        parts = []
        for mine in regions.values():
            region = mine[0]["region"]
            flat = torch.cat([e["state"][key] for e in sorted(mine, key=lambda e: e["range"])])
            value = flat.view([end - begin for begin, end in region])
            parts.append({"shape": mine[0]["shape"], "region": region, "value": value})
        found[key] = _joined(parts, f"{key} of {name}")
    return found


def _joined(entries: Sequence[dict[str, Any]], name: str) -> Tensor:
    if not entries:
        raise DataError(f"{name} is in no worker's part of the checkpoint")
    whole: Tensor = entries[0]["value"].new_empty(entries[0]["shape"])
    filled = 0
    for entry in entries:
        whole[_at(entry["region"])] = entry["value"]
        filled += entry["value"].numel()
    if filled != whole.numel():
        raise DataError(f"of {name}, {filled:,} of {whole.numel():,} numbers are in the checkpoint")
    return whole


def whole_state(parameter: Tensor, mine: Mapping[str, Any]) -> dict[str, Any]:
    """A state as an optimizer keeps it: of a DTensor, tensors of its shape are DTensors."""
    return {
        key: as_gradient(parameter, value.to(local(parameter).device).clone())
        if _fits(value, local(parameter).shape)
        else _copied(value)
        for key, value in mine.items()
    }


def join_model(saved: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The model's state dict, out of what all workers saved."""
    names = dict.fromkeys(name for each in saved for name in each["model"])
    return {name: _joined([e["model"][name] for e in saved if name in e["model"]], name) for name in names}


def _join_local(parameter: Tensor, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of what this worker holds of a parameter, out of that of its strips."""
    shape = local(parameter).shape
    here = [{**entry, "shape": list(shape), "region": [[0, size] for size in shape]} for entry in entries]
    return whole_state(parameter, join_state(here, "a strip"))


def _pieces_state(owned: OwnedGroups, optimizers: Iterable[Optimizer], named: Mapping[str, Tensor]) -> Any:
    """What this worker keeps of its strips, by parameter: a list that others can join with theirs."""
    found = []
    for optimizer in optimizers:
        for name, parameter in named.items():
            for piece, _ in owned.pieces_of.get(id(parameter), []):
                if piece.parameter in optimizer.state:
                    state = optimizer.state[piece.parameter]
                    found.append([name, state_entry(parameter, state, piece.start, piece.stop)])
    return found


def join_strips(core: Core, wait: Callable[[Work], None]) -> None:
    """After strip-owned updates: the optimizers' state, whole again on every worker."""
    reducer = core.reducer
    if not isinstance(reducer, ShardedReducer):
        return
    for group in core.groups:
        replicas = Replicas(group.endpoint, wait)
        pairs = [zip(bucket.names, bucket.parameters, strict=True) for bucket in group.buckets]
        named = dict(chain(*pairs))
        mine = _pieces_state(reducer.owned, core.optimizers, named)
        entries: dict[str, list[dict[str, Any]]] = {}
        for rank in range(group.endpoint.lane.world_size):
            for name, entry in replicas.broadcast_state(mine, rank):
                entries.setdefault(name, []).append(entry)
        for name, found in entries.items():
            reducer.owned.joined[id(named[name])] = _join_local(named[name], found)
