"""Who of a process group comes to attach, and who dies before: told by the group's own connections.

Until all have met, nobody has a connection of ours that could break, and a worker that is dead looks like one
that still loads its data. The Gloo group that a user's script has started connects them already: each worker
says over it that it has come, and waits for the others in order of rank. A wait for a dead one fails at once.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import PeerLost
from thinwire.wire.waiters import Waiters

_TAG = 0x7477
"""Of messages from one worker to another, unlike those of users."""


class Presence:
    """Waits in a thread of its own. Without Gloo in the group it does nothing."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.lost: PeerLost | None = None
        """Who has died."""
        self.complete = False
        """Whether all have come."""
        self._outbox, self._inbox = torch.zeros(1), torch.zeros(1)  # the backend keeps pointers to them
        self._deadline = time.monotonic() + timeout_s
        self._waiters = Waiters("thinwire-presence", limit=1)
        self._waiters.submit(lambda: self._run(group))

    @property
    def left_s(self) -> float:
        """Until the time-out; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def join(self) -> None:
        """Until all have come, or one is lost or late."""
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
            self._lose(other, error)

    def _wait(self, handle: Any) -> None:
        handle.wait(timedelta(seconds=max(0.01, self.left_s)))

    def _lose(self, rank: int, error: RuntimeError) -> None:
        if self.left_s > 0:  # otherwise it is late, as others will say
            self.lost = PeerLost(
                f"worker {rank} has ended after the process group was started and before it attached",
                rank=rank,
                hint=f"see that worker's own output ({str(error).splitlines()[0]})",
            )
