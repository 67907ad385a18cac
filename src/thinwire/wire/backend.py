"""Backends of torch.distributed, one for every lane: made by name, used again, dropped before the interpreter
ends.

They are made directly instead of by `dist.new_group`: that one names a group after how many there are, so all
workers would have to make theirs in one order, and it leaks descriptors. The only file that names a backend.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store

from thinwire.wire.waiters import park_all


@dataclass(slots=True)
class Backends:
    """What one lane talks through: Gloo for the CPU, and NCCL for GPUs where the world has it."""

    key: tuple[object, ...]
    number: int
    """Of those with this key."""
    cpu: Any
    cuda: Any = None


@dataclass(slots=True)
class Pool:
    """Connected backends that are not in use, by lane. Connecting a full mesh is the slow part of attach."""

    _world: ProcessGroup | None = None
    _generation: int = 0
    _free: dict[tuple[object, ...], list[Backends]] = field(default_factory=dict)
    _made: dict[tuple[object, ...], int] = field(default_factory=dict)
    _uses: dict[tuple[int, ...], int] = field(default_factory=dict)
    _clients: list[Store] = field(default_factory=list)
    made: list[Backends] = field(default_factory=list)
    """All of this world."""
    ends_world: bool = False
    """Whether the default process group is ours to end."""
    watch_client: Store | None = None
    """The store's client for all heartbeats."""

    def take(self, ranks: Sequence[int], name: str, timeout_s: float) -> Backends:
        """A backend for a lane; blocks until all of `ranks` take theirs."""
        key = (tuple(ranks), name, timeout_s)
        if free := self._free.get(key):
            free.sort(key=lambda backends: backends.number)  # the same one on all workers
            return free.pop(0)
        number = self._made[key] = self._made.get(key, 0) + 1
        label = f"thinwire/{self._generation}/{'-'.join(map(str, ranks))}/{name}/{number}"
        # A client is locked while somebody waits in it, so each thread that connects needs its own.
        client = self._clients.pop() if self._clients else new_client()
        backends = Backends(key, number, *_connect(client, ranks, label, timeout_s))
        self._clients.append(client)
        self.made.append(backends)
        return backends

    def give_back(self, backends: Backends) -> None:
        if self._world is dist.group.WORLD and self._world is not None:
            self._free.setdefault(backends.key, []).append(backends)

    def use(self, ranks: Sequence[int]) -> str:
        """A name for the next use of these ranks, the same on all of them."""
        if self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self._generation += 1
            self._free, self._made, self._uses, self._clients, self.made = {}, {}, {}, [], []
            self.watch_client = new_client()
        uses = self._uses[tuple(ranks)] = self._uses.get(tuple(ranks), 0) + 1
        return f"{self._generation}/{'-'.join(map(str, ranks))}/{uses}"

    def clear(self) -> None:
        self._free.clear()
        self._clients.clear()
        self.made.clear()
        self.watch_client = None


pool = Pool()


def _connect(client: Store, ranks: Sequence[int], label: str, timeout_s: float) -> tuple[Any, Any]:
    timeout = datetime.timedelta(seconds=timeout_s)
    rank, size = list(ranks).index(dist.get_rank()), len(ranks)
    gloo = dist.ProcessGroupGloo(PrefixStore(f"{label}/cpu", client), rank, size, timeout)
    if not has_nccl():
        return gloo, None
    options = dist.ProcessGroupNCCL.Options()  # not tried with several GPUs: NCCL refuses to share one
    options._timeout = timeout
    return gloo, dist.ProcessGroupNCCL(PrefixStore(f"{label}/cuda", client), rank, size, options)


def new_client() -> Store:
    """A client of the store that joins the workers, which now and then takes 5 s to connect (torch 2.13)."""
    client: Store = _get_default_store().clone()  # type: ignore[attr-defined]  # not in the stubs
    return client


def has_nccl() -> bool:
    """Whether the world has NCCL for tensors on GPUs."""
    return "nccl" in dist.get_backend_config()


def start_world() -> None:
    """Start the default process group, which is then ours to end."""
    # NCCL only where every worker of this machine has a GPU of its own
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = not dist.is_nccl_available() or workers_here > torch.cuda.device_count()
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl")
    pool.ends_world = True


def _at_exit() -> None:
    if park_all():
        # A backend with something under way can be neither aborted nor destroyed: it ends with the process.
        for backends in pool.made:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backends.cpu))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backends.cuda))
        return
    pool.clear()
    if pool.ends_world and dist.is_initialized():
        dist.destroy_process_group()


atexit.register(_at_exit)  # at import, so that it runs after what others register later
