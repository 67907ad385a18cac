"""TLS connections as the backend of a lane, in the place of Gloo."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.wire.tls import collectives
from thinwire.wire.tls.files import Contexts
from thinwire.wire.tls.meeting import meet
from thinwire.wire.tls.mesh import TlsMesh
from thinwire.wire.waiters import Wait
from thinwire.wire.work import Work


@dataclass(slots=True, eq=False)
class TlsSource:
    """The connections of one link, which all its lanes share; made when the first lane connects."""

    store: Store
    """The store that joins the workers."""
    own_rank: int
    ranks: Sequence[int]
    """Ranks of all workers, as lanes name them."""
    contexts: Contexts
    meets_within_s: float
    has_nccl: bool = False
    """Tensors on GPUs go by the CPU: NCCL does not encrypt."""
    hears_anyone: bool = True
    _mesh: TlsMesh | None = None
    _given_up: bool = False
    _num_taken: dict[str, int] = field(default_factory=dict)
    _in_use: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, ranks: Sequence[int], name: str, timeout_s: float) -> TlsBackend:
        """The backend of a lane; blocks only the first time, until all workers have connected."""
        if self._mesh is None and not self._given_up:
            rank = list(self.ranks).index(self.own_rank)
            store = PrefixStore("thinwire", self.store)
            self._keep(meet(store, rank, len(self.ranks), self.contexts, self.meets_within_s))
        if self._mesh is None or self._given_up:
            raise RuntimeError("this worker has given up")
        label = f"{list(ranks)}/{name}"
        with self._lock:
            number = self._num_taken[label] = self._num_taken.get(label, 0) + 1
            self._in_use += 1
        digest = hashlib.sha256(f"{label}/{number}".encode()).digest()
        places = [list(self.ranks).index(each) for each in ranks]
        rank = list(ranks).index(self.own_rank)
        return TlsBackend(self._mesh, int.from_bytes(digest[:8], "big"), places, rank)

    def _keep(self, mesh: TlsMesh) -> None:
        with self._lock:
            if not self._given_up:
                self._mesh = mesh
                return
        mesh.abort()
        mesh.join()

    def give_back(self, backend: object) -> None:
        """Take back a lane's backend; the last one ends the connections."""
        with self._lock:
            self._in_use -= 1
            is_last = self._in_use == 0
        if is_last and self._mesh is not None:
            self._mesh.close()

    def abort(self) -> None:
        """Connections that are being made now are ended as soon as they are."""
        with self._lock:
            self._given_up, mesh = True, self._mesh
        if mesh is not None:
            mesh.abort()

    def clear(self) -> None:
        """End the connections for good."""
        self.abort()
        if self._mesh is not None:
            self._mesh.join()


@dataclass(slots=True)
class _Call:
    """A collective under way, in the form of torch's handles."""

    wait: Wait


class TlsBackend:
    """The operations of one lane, called as torch's backends are."""

    def __init__(self, mesh: TlsMesh, lane: int, places: Sequence[int], rank: int) -> None:
        """`places`: those of this lane's workers in the mesh; `rank`: that of this worker among them."""
        self._mesh, self._lane, self._places = mesh, lane, list(places)
        self.rank, self.world_size = rank, len(self._places)
        self.cpu, self.cuda = self, None
        self._numbers = count()
        """Numbers of collectives, which all workers issue in one order."""

    def abort(self) -> None:
        """End what is under way with an error, on all lanes of this link."""
        self._mesh.abort()

    # -- messages -------------------------------------------------------------------------------------

    def post_send(self, data: Tensor, to: int, tag: int) -> Work:
        return self._mesh.send(data, self._places[to], self._lane, tag)

    def post_receive(self, data: Tensor, source: int | None, tag: int) -> Work:
        place = None if source is None else self._places[source]
        return self._mesh.receive(data, place, self._lane, tag)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self.post_send(tensors[0], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self.post_receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.post_receive(tensors[0], None, tag)

    # -- collectives ----------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], options: object) -> _Call:
        return _Call(collectives.all_reduce(self, next(self._numbers), tensors[0]))

    def _allgather_base(self, out: Tensor, data: Tensor, options: object) -> _Call:
        return _Call(collectives.all_gather(self, next(self._numbers), data, out))

    def alltoall_base(
        self, out: Tensor, data: Tensor, out_sizes: list[int], sizes: list[int], options: object
    ) -> _Call:
        return _Call(collectives.all_to_all(self, next(self._numbers), data, out))

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Call:
        return _Call(collectives.broadcast(self, next(self._numbers), tensors[0], options.rootRank))
