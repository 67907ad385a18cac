"""Connects again to workers whose connection broke, or finds that their process does not listen any more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from thinwire.elastic.membership import Member

_CONNECT_S = 1.0
_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.0)
"""A process that ends may close its listening socket after its connections: then look again."""


class Reconnector:
    """Attempts to connect that are under way, each in a thread of its own."""

    def __init__(
        self,
        lock: threading.Condition,
        *,
        is_settled: Callable[[Member], bool],
        refused: Callable[[Member], None],
        opened: Callable[[socket.socket, Member], None],
        ended: Callable[[], None],
    ) -> None:
        """`lock` is held when `start` is called, and here for `is_settled` (there is a connection, or the
        worker is known to be dead) and `ended`. `refused`: nobody listens there; `opened` is given a new
        connection."""
        self._lock, self._is_settled = lock, is_settled
        self._refused, self._opened, self._ended = refused, opened, ended
        self._under_way: set[str] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._under_way

    def start(self, member: Member) -> None:
        """Try to reach a worker, unless an attempt is under way."""
        if member.id not in self._under_way and not self._is_settled(member):
            self._under_way.add(member.id)
            threading.Thread(target=self._try, args=(member,), name="thinwire-reconnect", daemon=True).start()

    def _try(self, member: Member) -> None:
        """Try until there is a connection, or the member is known to be dead or out of reach; of two who lost
        their connection, the later member makes the new one."""
        for pause_s in _AGAIN_S:
            if not self._listens(member):
                break
            with self._lock:
                settled = self._is_settled(member)
            if settled:
                break
            time.sleep(pause_s)
        with self._lock:
            self._under_way.discard(member.id)
            self._ended()

    def _listens(self, member: Member) -> bool:
        """Connect once; a port that refuses belonged to a process that has ended."""
        try:
            connection = socket.create_connection((member.host, member.port), timeout=_CONNECT_S)
        except ConnectionRefusedError:
            self._refused(member)
            return False
        except OSError:
            return False  # it cannot be reached: silence will tell
        self._opened(connection, member)
        return True
