"""Trees of tensors and plain values to a folder and back, in the format of torch.distributed.checkpoint.

The planners and storage of torch.distributed.checkpoint are driven here, one folder per writer, instead of by
its `save`: that one needs collectives, which a background thread must not mix into anybody's, or else warns.
Its own tools can read the folders: `dcp.load({"model": model.state_dict()}, checkpoint_id=folder)`.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

_TREE = "tree"
"""The entry that holds all that is not a tensor."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands in the tree where a tensor was."""

    name: str


def snapshot(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` that training cannot change any more: tensors by name, and the rest under `tree`."""
    tensors: dict[str, Any] = {}
    tensors[_TREE] = _take_out(tree, "", tensors)
    return tensors


def _take_out(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    if isinstance(value, Tensor):
        while name in tensors or name == _TREE:  # {"a.b": x, "a": {"b": y}}
            name += "_"
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return _Slot(name)
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {key: _take_out(each, f"{inner}{key}", tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(each, f"{inner}{i}", tensors) for i, each in enumerate(value))
    return copy.deepcopy(value)


def _put_back(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _put_back(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_back(each, tensors) for each in value)
    return value


def write(folder: Path, taken: dict[str, Any]) -> None:
    """Write a snapshot into a new folder; every file has reached the disk when this returns."""
    writer = FileSystemWriter(folder, sync_files=True, overwrite=False)
    # both flattenings lose empty dicts and the difference between 1 and "1"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(taken, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])


def read(folder: Path) -> dict[str, Any]:
    """The tree whose snapshot was written into `folder`; tensors are on the CPU."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    planner = _EmptyStateDictLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    tree: dict[str, Any] = _put_back(planner.state_dict[_TREE], planner.state_dict)
    return tree


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder: torch.distributed.checkpoint itself does not notice a flipped bit."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut, as fsync does for the contents of files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
