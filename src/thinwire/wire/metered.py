"""A wire around another wire that counts what this worker sends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.traffic import Round, Traffic
from thinwire.wire.base import Wire, Work

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.errors import PeerError, PeerLate


class Meter:
    """A running total, shared by a wire and its lanes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.traffic = Traffic()
        self.rounds = 0

    def count(self, traffic: Traffic) -> None:
        with self._lock:
            self.traffic += traffic
            self.rounds += 1


class MeteredWire:
    """Passes everything on and counts it; lanes count into the same meter."""

    def __init__(self, inner: Wire, meter: Meter) -> None:
        self.inner = inner
        self.meter = meter
        self.rank = inner.rank
        self.world_size = inner.world_size

    def all_reduce_(self, data: Tensor) -> Work:
        self._count(Round(op="all_reduce", send_bytes=data.nbytes))
        return self.inner.all_reduce_(data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        self._count(Round(op="reduce_scatter", send_bytes=data.nbytes))
        return self.inner.reduce_scatter(data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        self._count(Round(op="all_gather", send_bytes=data.nbytes))
        return self.inner.all_gather(data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        self._count(Round(op="all_to_all", send_bytes=data.nbytes))
        return self.inner.all_to_all(data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        self._count(Round(op="broadcast", send_bytes=data.nbytes, source=source))
        return self.inner.broadcast_(data, source=source)

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        sizes = [0 if data is None else data.nbytes for data in (send, recv)]
        self._count(Round(op="exchange", send_bytes=sizes[0], recv_bytes=sizes[1]))
        return self.inner.exchange(send=send, to=to, recv=recv, source=source, tag=tag)

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> MeteredWire:
        return MeteredWire(self.inner.lane(name, ranks), self.meter)

    def now(self) -> float:
        return self.inner.now()

    def tell(self, status: str) -> None:
        self.inner.tell(status)

    def late(self, cause: str) -> PeerLate:
        return self.inner.late(cause)

    def fail(self, error: PeerError) -> None:
        self.inner.fail(error)

    def close(self) -> None:
        self.inner.close()

    def _count(self, round_: Round) -> None:
        if self.world_size > 1:
            self.meter.count(round_.traffic(self.rank, self.world_size))
