"""What members of one generation tell each other to connect their backends, in the form torch asks for.

It goes over the control sockets: no process hosts a store that could die with it, and no port is open to
whoever connects.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from thinwire.elastic.peers import PeerConnections

_WAIT_S = 300.0


class PeerStore(Store):
    """Keys and values of one generation. A value is published once and never changes."""

    def __init__(self, peers: PeerConnections, generation: int, lineage: str) -> None:
        """`lineage`: a world that went on by itself may be at the same generation, and heard again."""
        super().__init__()
        self._peers, self.generation, self._lineage = peers, generation, lineage

    @property
    def host(self) -> str:
        """Where this worker is reached."""
        return self._peers.me.host

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._peers.publish(self.generation, f"{self._lineage}/{key}", data)

    def get(self, key: str) -> bytes:
        return self._wait([key], _WAIT_S)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=_WAIT_S)) -> None:
        self._wait(keys, timeout.total_seconds())

    def clone(self) -> PeerStore:
        """Several threads may wait in it, so it is its own clone."""
        return self

    def _wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        found = self._peers.published(self.generation, [f"{self._lineage}/{key}" for key in keys], timeout_s)
        if found is None and time.monotonic() > deadline:
            raise RuntimeError(f"{', '.join(keys)} was not published within {timeout_s:g} s")
        if found is None:
            raise RuntimeError(f"generation {self.generation} ended before all had published {keys[0]}")
        return found
