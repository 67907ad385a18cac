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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store

from thinwire.errors import UsageError, check
from thinwire.wire.sockets import Opened, opened_by, shut_down
from thinwire.wire.waiters import stop_all

_COME_BACK_S = 2.0


class Connected(Protocol):
    """The backends that one lane sends through."""

    @property
    def cpu(self) -> Any:
        """A backend of torch.distributed, or an object with its methods."""

    @property
    def cuda(self) -> Any: ...

    def abort(self) -> None:
        """End what is under way with an error."""


class Source(Protocol):
    """Source of the backends for the lanes of a link."""

    @property
    def store(self) -> Store | None: ...

    @property
    def own_rank(self) -> int: ...

    @property
    def has_nccl(self) -> bool:
        """Whether tensors on GPUs travel by NCCL."""

    @property
    def hears_anyone(self) -> bool:
        """Whether it can receive from whoever comes, and such a receive ends when all connections do."""

    def take(self, ranks: Sequence[int], name: str, timeout_s: float) -> Connected:
        """Backends for one lane; blocks until all of `ranks` take theirs."""

    def give_back(self, backends: Any) -> None:
        """Take back the backends of a lane that has ended, with nothing under way."""

    def abort(self) -> None:
        """Have everybody come back who waits in a backend."""

    def clear(self) -> None:
        """Drop everything for good."""


@dataclass(slots=True)
class Backends:
    """Backends of one lane: Gloo for the CPU, and NCCL for GPUs where the world has it."""

    key: tuple[object, ...]
    number: int
    """Number among the backends with this key."""
    cpu: Any
    cuda: Any
    sockets: Opened

    def abort(self) -> None:
        """End what is under way with an error."""
        shut_down(self.sockets)


@dataclass(slots=True)
class Pool:
    """Connected backends that are not in use, by lane. Connecting a full mesh is the slow part of attach."""

    store: Store | None = None
    """The store that joins these workers, and nobody else; None: that of the default process group."""
    rank: int | None = None
    """Rank of this worker among those that the store joins; None: its rank in the default process group."""
    world: ProcessGroup | None = None
    """The process group that the backends belong to, also after the user has destroyed it."""
    _generation: int = 0
    _free: dict[tuple[object, ...], list[Backends]] = field(default_factory=dict)
    _made: dict[tuple[object, ...], int] = field(default_factory=dict)
    _uses: dict[tuple[int, ...], int] = field(default_factory=dict)
    _clients: list[Store] = field(default_factory=list)
    _client_sockets: Opened = field(default_factory=list)
    made: list[Backends] = field(default_factory=list)
    """All backends of this world."""
    ends_world: bool = False
    """Whether the default process group is ours to end."""
    watch_client: Store | None = None
    """The store's client for all heartbeats."""
    hears_anyone: bool = False

    @property
    def own_rank(self) -> int:
        return dist.get_rank() if self.rank is None else self.rank

    @property
    def has_nccl(self) -> bool:
        """Whether tensors on GPUs travel by NCCL."""
        return self.store is None and has_nccl()

    def take(self, ranks: Sequence[int], name: str, timeout_s: float) -> Backends:
        """A backend for a lane; blocks until all of `ranks` take theirs."""
        key = (tuple(ranks), name, timeout_s)
        if free := self._free.get(key):
            free.sort(key=lambda backends: backends.number)  # the same one on all workers
            return free.pop(0)
        number = self._made[key] = self._made.get(key, 0) + 1
        label = f"thinwire/{self._generation}/{'-'.join(map(str, ranks))}/{name}/{number}"
        # A client is locked while somebody waits in it, so each thread that connects needs its own.
        client = self._clients.pop() if self._clients else self.new_client()
        (cpu, cuda), sockets = opened_by(lambda: self._connect(client, ranks, label, timeout_s))
        backends = Backends(key, number, cpu, cuda, sockets)
        self._clients.append(client)
        self.made.append(backends)
        return backends

    def _connect(self, client: Store, ranks: Sequence[int], label: str, timeout_s: float) -> tuple[Any, Any]:
        timeout = datetime.timedelta(seconds=timeout_s)
        rank, size = list(ranks).index(self.own_rank), len(ranks)
        gloo = dist.ProcessGroupGloo(PrefixStore(f"{label}/cpu", client), rank, size, timeout)
        if not self.has_nccl:
            return gloo, None
        options = dist.ProcessGroupNCCL.Options()  # not tried with several GPUs: NCCL refuses to share one
        options._timeout = timeout
        return gloo, dist.ProcessGroupNCCL(PrefixStore(f"{label}/cuda", client), rank, size, options)

    def give_back(self, backends: Backends) -> None:
        if self.world is dist.group.WORLD and self.world is not None:
            self._free.setdefault(backends.key, []).append(backends)

    def use(self, ranks: Sequence[int]) -> str:
        """A name for the next use of these ranks, the same on all of them."""
        if self.world is not dist.group.WORLD:
            self.world = dist.group.WORLD
            self._generation += 1
            self._free, self._made, self._uses, self._clients, self.made = {}, {}, {}, [], []
            self.watch_client = None
        uses = self._uses[tuple(ranks)] = self._uses.get(tuple(ranks), 0) + 1
        return f"{self._generation}/{'-'.join(map(str, ranks))}/{uses}"

    def new_client(self) -> Store:
        """A client of the store that joins the workers; torch 2.13 now and then takes 5 s to connect one."""
        store = self.store or _get_default_store()
        client, sockets = opened_by(store.clone)  # type: ignore[attr-defined]  # not in the stubs
        self._client_sockets += sockets
        return client  # type: ignore[no-any-return]

    def abort(self) -> None:
        """At exit: have everybody come back who waits in a backend or the store."""
        for backends in self.made:
            backends.abort()
        shut_down(self._client_sockets)

    def clear(self) -> None:
        self._free.clear()
        self._clients.clear()
        self.made.clear()
        self.watch_client = None


pool = Pool()
"""Pool of the default process group."""
own_pools: list[Source] = []
"""Pools of stores of their own, and connections of TLS, while they are in use."""
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables in which srun and mpirun tell how many processes they have started."""


def has_nccl() -> bool:
    """Whether the world has NCCL for tensors on GPUs."""
    return "nccl" in dist.get_backend_config()


def has_world() -> bool:
    """Whether the environment says which worker of which world this is, as torchrun and most other launchers
    do; UsageError if it says only half of it."""
    if dist.is_torchelastic_launched():
        return True
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for name in _SIZES:
            if os.environ.get(name, "1") != "1":
                warnings.warn(
                    f"{name} is {os.environ[name]} and WORLD_SIZE is not set: each worker trains alone; "
                    f"to train together, set {', '.join(_WORLD)} for each of them",
                    stacklevel=4,
                )
        return False
    missing = [name for name in _WORLD if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing)} is not set, so this worker "
            "cannot find the others",
            hint="start it with torchrun, or set RANK (from 0), WORLD_SIZE, and rank 0's MASTER_ADDR and "
            "MASTER_PORT on every worker; to train alone, unset WORLD_SIZE",
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        check(os.environ[name].isdecimal(), name, "a whole number", os.environ[name])
    world_size = os.environ["WORLD_SIZE"]
    below = int(os.environ["RANK"]) < int(world_size)
    check(below, "RANK", f"below WORLD_SIZE, which is {world_size}", os.environ["RANK"])
    return True


def start_world() -> None:
    """Start the default process group, which is then ours to end."""
    # NCCL only where every worker of this machine has a GPU of its own
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = not dist.is_nccl_available() or workers_here > torch.cuda.device_count()
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl")
    pool.ends_world = True


def _at_exit() -> None:
    for each in (pool, *own_pools):
        each.abort()
    if not stop_all(timeout_s=_COME_BACK_S):
        # Somebody is in a backend for good: it connects to a host that is cut off, say. Destroying it would
        # wait for them, so it outlives the interpreter, and the script keeps its exit code.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return
    for each in (pool, *own_pools):
        each.clear()
    # A DDP wrapper that is the last owner of a Gloo group joins the group's threads while it holds the GIL,
    # for which one of them may be waiting (torch 2.13). The pool owns the group too, but it may go before a
    # wrapper in the user's script does: so its reference stays for good.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool.world))
    if pool.ends_world and dist.is_initialized():
        dist.destroy_process_group()


atexit.register(_at_exit)  # at import, so that it runs after what others register later
