"""Connections that others make to this worker: a handshake in a thread of its own each, and few at a time."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from thinwire.elastic.handshake import KeyedChannel, Silence, Stranger, open_door
from thinwire.elastic.roster import Roster

_log = logging.getLogger("thinwire")
_MOST_AT_ONCE = 32


class Acceptor:
    """The handshakes under way at one listening socket."""

    def __init__(
        self, key: bytes, roster: Callable[[], Roster], welcome: Callable[[KeyedChannel], None]
    ) -> None:
        """`roster`: who is in at present; `welcome` is given whoever knows the key."""
        self._key, self._roster, self._welcome = key, roster, welcome
        self._strangers: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def greet(self, connection: socket.socket, address: str) -> None:
        """Shake hands with whoever has come."""
        if self._count >= _MOST_AT_ONCE:
            connection.close()
            return
        self._count += 1
        roster = self._roster()
        generation = 0 if roster.membership is None else roster.membership.generation

        def shake() -> None:
            try:
                channel = open_door(connection, roster.me, self._key, generation)
            except (Stranger, OSError) as error:
                self._note_stranger(address, error)
            else:
                self._welcome(channel)
            finally:
                self._count -= 1

        threading.Thread(target=shake, name="thinwire-guest", daemon=True).start()

    def _note_stranger(self, address: str, error: Exception) -> None:
        roster = self._roster()
        if isinstance(error, Silence):
            if roster.membership is None:
                return  # it may be a member of the world that this worker is to join
            if address in {each.host for each in roster.membership.members}:
                return  # a member that looks whether this one still listens
        if address not in self._strangers:
            self._strangers.add(address)
            _log.warning("refused a connection from %s: %s; told once per address", address, error)
