"""A worker that asks to be taken in: it connects to whoever answers, and to all members that one names."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from thinwire.elastic.handshake import Stranger
from thinwire.elastic.membership import Member, Membership
from thinwire.errors import DataError, PeerLost

RETRY_S = 0.5
Address = tuple[str, int]


class Joining:
    """One attempt to join a world, in a thread of its own, until it is no longer `wanted`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        lock: threading.Condition,
        *,
        wanted: Callable[[], bool],
        connected: Callable[[], Sequence[str]],
        connect: Callable[[Address], None],
        reach: Callable[[Member], None],
        ask: Callable[[], None],
    ) -> None:
        """`lock` is held for `connected`, the workers to which there is a connection, for `reach`, which
        starts to connect to a member, and for `ask`, which asks all of them; `connect` may raise OSError or
        Stranger."""
        self._addresses, self._lock, self._wanted = list(addresses), lock, wanted
        self._connected, self._connect, self._reach, self._ask = connected, connect, reach, ask
        self.world: tuple[Member, ...] = ()
        """Members of the world that this worker wants to join."""
        self._last_answer_s = time.monotonic()
        threading.Thread(target=self._run, name="thinwire-join", daemon=True).start()

    def hear_members(self, told: object) -> None:
        """The members of the world, as one of them tells."""
        with contextlib.suppress(DataError):
            self.world = Membership.from_json(told).members
        self._reach_missing()

    def check_answers(self, most_s: float) -> None:
        """PeerLost if nobody has answered for so long."""
        if time.monotonic() > self._last_answer_s + most_s:
            names = ", ".join(f"{host}:{port}" for host, port in self._addresses)
            raise PeerLost(
                f"nobody who would let this worker join has answered for {most_s:g} s at {names}",
                hint="is the run over? a worker that trains prints its address (link.address)",
            )

    def _run(self) -> None:
        while self._wanted():
            for address in self._addresses:
                with self._lock:
                    if self._connected():
                        break
                with contextlib.suppress(OSError, Stranger):
                    self._connect(address)
            with self._lock:
                there = self._connected()
                if there:
                    self._last_answer_s = time.monotonic()
                if self._reach_missing():
                    self._ask()
            time.sleep(RETRY_S)

    def _reach_missing(self) -> bool:
        """Whether there is a connection to every member; on a busy host an attempt may come to nothing, and
        is made again."""
        there = self._connected()
        missing = [member for member in self.world if member.id not in there]
        for member in missing:
            self._reach(member)
        return bool(self.world) and not missing
