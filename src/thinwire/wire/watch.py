"""Who is still there: heartbeats and one alarm bell, in the key-value store of the process group.

A backend notices a broken connection only where it touches it; everyone else would wait for the
time-out. So each worker beats into the store, looks at the beat of its right-hand neighbour (three
small store operations per worker and beat, whatever the world size), and listens for the alarm.
Whoever learns that a worker is gone rings it; the first cause rung is the one all workers report.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerError, PeerLate, PeerLost

BEAT_S = 0.5
SILENCE_S = 10.0
"""A worker that has not beaten for this long is lost: killed, frozen or cut off."""
_NOTICE_S = 4 * BEAT_S


class _Beat(NamedTuple):
    beats: int
    host: str
    site: str
    pid: int
    status: str
    """What it is doing: "step 17", "step 17, waiting", ...; "left" once it has detached or ended."""


class Watch:
    """Beats for this worker and watches the others; one for a wire and all its lanes."""

    def __init__(self, store: Store, name: str, ranks: Sequence[int]) -> None:
        """`ranks`: of these workers in the default process group."""
        self.ranks = list(ranks)
        self._store = store
        self._prefix = f"thinwire/{name}/"
        self._rank = self.ranks.index(dist.get_rank())
        self._world_size = len(self.ranks)
        self._status = "step 0"
        self._lock = threading.Lock()
        self._lost: PeerError | None = None
        self._listeners: list[Callable[[PeerError], None]] = []
        self._stopped = threading.Event()
        self._beats = 0
        self._places: list[tuple[str, str]] | None = None
        self._beat()
        self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
        self._thread.start()
        atexit.register(self._say_left)

    @property
    def places(self) -> list[tuple[str, str]]:
        """Host and site of every worker, once all have attached: each beats before it connects."""
        if self._places is None:
            beats = [self._read(rank) for rank in range(self._world_size)]
            self._places = [("", "") if beat is None else (beat.host, beat.site) for beat in beats]
        return self._places

    def when_lost(self, call: Callable[[PeerError], None]) -> None:
        """Call, from the watching thread or the one that rings, when a worker is lost."""
        with self._lock:
            self._listeners.append(call)

    def tell(self, status: str) -> None:
        """What this worker is doing, for others to read when they wait for it."""
        self._status = status

    def ring(self, error: PeerError) -> None:
        """Tell all workers why training ends here; the first cause rung counts everywhere."""
        record = json.dumps([type(error).__name__, error.message, error.rank, error.host, error.hint])
        try:
            record = self._store.compare_set(self._prefix + "alarm", "", record).decode()
        except RuntimeError:
            pass  # the store is gone too: at least this worker stops with its own cause
        self._hear(record)

    def explain(self, error: BaseException) -> PeerError:
        """Which worker is behind a failed operation? Those that stop beating now are."""
        before = self._read_all()
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            if self._lost is not None:
                return self._lost
            time.sleep(BEAT_S / 4)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        for rank, beat in enumerate(self._read_all()):
            if rank == self._rank or beat is None:
                continue
            if beat.status == "left":
                ended = f"worker {rank} on {beat.host} has ended while others still train"
                hint = "give all workers the same number of steps, or loop inside link.join()"
                return PeerLost(ended, rank=rank, host=beat.host, hint=hint)
            old = before[rank]
            if old is not None and old.beats == beat.beats:
                return self._silent(rank, beat, "its connections broke")
        return self.late(f"an operation failed: {cause}")

    def late(self, cause: str) -> PeerLate:
        """Nobody is dead: name the worker the others wait for, one that is not itself waiting."""
        beats = {r: b for r, b in enumerate(self._read_all()) if b is not None and b.status != "left"}
        beats.pop(self._rank, None)
        if not beats:
            return PeerLate(cause)
        behind = min(beats, key=lambda r: (beats[r].status.endswith("waiting"), _step_of(beats[r].status)))
        beat = beats[behind]
        alive = f"worker {behind} on {beat.host} (pid {beat.pid}) is alive, at {beat.status}"
        message = f"{cause}; {alive}; this worker is at {self._status}"
        join = "loop inside link.join() if it has fewer batches"
        hint = f"look at what that worker is doing, {join}, or raise timeout_s in attach"
        return PeerLate(message, rank=behind, host=beat.host, hint=hint)

    def stop(self) -> None:
        """Say good-bye: from now on nobody misses this worker."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._say_left()
        atexit.unregister(self._say_left)

    # -- inside -----------------------------------------------------------------------------------

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        last_count, last_change, store_seen = -1, time.monotonic(), time.monotonic()
        while not self._stopped.wait(BEAT_S):
            try:
                self._beat()
                if self._store.check([self._prefix + "alarm"]):
                    self._hear(self._store.get(self._prefix + "alarm").decode())
                    return
                beat = self._read(neighbour)
                store_seen = time.monotonic()
            except RuntimeError as error:
                if time.monotonic() - store_seen > SILENCE_S / 2:
                    lost = f"worker {self._rank} lost the store that joins the workers ({error})"
                    hint = "the process that hosts it (torchrun's, or rank 0) has ended"
                    self._tell_listeners(PeerLost(lost, hint=hint))
                    return
                continue
            now = time.monotonic()
            if beat is None or beat.status == "left" or beat.beats != last_count:
                last_count, last_change = beat.beats if beat else -1, now
            elif now - last_change > SILENCE_S:
                self.ring(self._silent(neighbour, beat, f"no sign of life for {SILENCE_S:.0f} s"))
                return

    def _beat(self) -> None:
        self._beats += 1
        site = os.environ.get("THINWIRE_SITE", "")
        beat = _Beat(self._beats, socket.gethostname(), site, os.getpid(), self._status)
        self._store.set(f"{self._prefix}beat/{self._rank}", json.dumps(beat))

    def _say_left(self) -> None:
        try:
            self.tell("left")
            self._beat()
        except RuntimeError:
            pass  # the store has ended before this worker, which is nobody's concern now

    def _read(self, rank: int) -> _Beat | None:
        key = f"{self._prefix}beat/{rank}"
        return _Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _read_all(self) -> list[_Beat | None]:
        try:
            return [self._read(rank) for rank in range(self._world_size)]
        except RuntimeError:
            return [None] * self._world_size

    def _silent(self, rank: int, beat: _Beat, how: str) -> PeerLost:
        lost = f"worker {rank} on {beat.host} (pid {beat.pid}) is lost at {beat.status}: {how}"
        hint = "see that worker's own output; it was killed, ran out of memory, froze or was cut off"
        return PeerLost(lost, rank=rank, host=beat.host, hint=hint)

    def _hear(self, record: str) -> None:
        kind, message, rank, host, hint = json.loads(record)
        cls = PeerLate if kind == "PeerLate" else PeerLost
        self._tell_listeners(cls(message, rank=rank, host=host, hint=hint))

    def _tell_listeners(self, error: PeerError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            listeners = list(self._listeners)
        for call in listeners:
            call(error)


def _step_of(status: str) -> int:
    digits = "".join(c for c in status if c.isdigit())
    return int(digits) if digits else 0
