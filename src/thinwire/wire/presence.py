"""Who of a process group comes to attach, and who dies before: told by the group's own connections.

Until all have met, nobody has a connection of ours that could break, and a worker that is dead looks like one
that still loads its data. The Gloo group that a user's script has started connects them already: each worker
says over it that it has come, and waits for the others in order of rank. A wait for a dead one fails at once.
Whoever finds one dead writes its name into the store before it ends too: the others may see that first.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import PeerLost
from thinwire.wire.backend import pool
from thinwire.wire.waiters import Waiters

_TAG = 0x7477
"""Tag of messages from one worker to another, unlike those of users."""
_ASK_S = 3.0
"""Time for the store to say who died; that may be the store's host."""
_LINGER_S = 1.0
"""Time for which worker 0, which may hold the store, keeps it up for others who are about to ask."""


class Presence:
    """Waits in a thread of its own. Without Gloo in the group it does nothing."""

    def __init__(self, group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        """`name`: the same on all workers, and another one every time."""
        self._name, self._rank, self._world_size = name, group.rank(), group.size()
        self.lost: PeerLost | None = None
        """Error that names the worker that has died."""
        self.complete = False
        """Whether all have come."""
        self._outbox, self._inbox = torch.zeros(1), torch.zeros(1)  # the backend keeps pointers to them
        self._deadline = time.monotonic() + timeout_s
        self._waiters = Waiters("thinwire-presence", limit=1)
        self._waiters.submit(lambda: self._run(group))

    @property
    def left_s(self) -> float:
        """Seconds until the time-out; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def join(self) -> None:
        """Wait until all have come, or one is lost or late."""
        self._waiters.stop()

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            found = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return
        if not isinstance(found, dist.ProcessGroupGloo):
            return
        backend: Any = found  # the stubs lack its methods
        others = [rank for rank in range(backend.size()) if rank != backend.rank()]
        sends = dict[int, Any]()
        other = -1
        try:
            for other in others:
                sends[other] = backend.send([self._outbox], other, _TAG)
            for other in others:
                self._wait(backend.recv([self._inbox], other, _TAG))
            for other in others:
                self._wait(sends[other])  # dropped before the peer takes it, it would not arrive
            self.complete = True
        except RuntimeError as error:
            if self.left_s > 0:  # otherwise it is late, as others will say
                self.lost = self.loss(self.first_dead(other), str(error))

    def _wait(self, handle: Any) -> None:
        handle.wait(timedelta(seconds=max(0.01, self.left_s)))

    @staticmethod
    def loss(rank: int, cause: str) -> PeerLost:
        return PeerLost(
            f"worker {rank} has ended after the process group was started and before it attached",
            rank=rank,
            hint=f"see that worker's own output ({cause.splitlines()[0]})",
        )

    def first_dead(self, rank: int) -> int:
        """The dead worker that the first to notice has named: `rank` if this worker is the first."""
        named, said = [rank], threading.Event()

        def ask() -> None:
            with suppress(RuntimeError, ValueError):
                store = pool.watch_client or pool.new_client()
                named.append(int(store.compare_set(f"{self._name}/dead", "", str(rank))))
                told = store.add(f"{self._name}/told", 1)
                deadline = time.monotonic() + _LINGER_S
                while self._rank == 0 and told < self._world_size - 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
                    told = store.add(f"{self._name}/told", 0)
            said.set()

        Waiters("thinwire-presence", limit=1).submit(ask)
        said.wait(_ASK_S)
        return named[-1]
