"""Who is still there, and what each worker does: heartbeats and one alarm, from every worker to every other.

A backend notices a broken connection only where it touches it; everyone else would wait for the time-out. So
each worker tells all others twice a second what it does. Whoever learns that a worker is gone (its connection
broke, it fell silent, an error left its training) tells everyone, and every worker reports the first cause it
hears. Nothing here waits for anybody, and nothing needs the store after the start.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerError, PeerLate, PeerLost
from thinwire.wire import control

BEAT_S = 0.5
SILENCE_S = 10.0
"""A worker that has not been heard of for this long is lost: killed, frozen or cut off."""
_NOTICE_S = 4 * BEAT_S
_GRACE_S = 0.3
"""A worker that stops with an error says so before its connection breaks."""
_MOST_BEATS_PER_S = 64


@dataclass(slots=True)
class Member:
    """What is known of one worker."""

    rank: int
    host: str
    site: str
    pid: int
    steps: int = 0
    """Optimizer steps done."""
    doing: str = ""
    """"waiting" for others, "detaching", "left", or nothing of these."""
    heard_s: float = 0.0
    """When it was last heard of."""
    gone_s: float | None = None
    """When its connection broke."""

    @property
    def name(self) -> str:
        return f"worker {self.rank} on {self.host} (pid {self.pid})"

    @property
    def status(self) -> str:
        return f"step {self.steps}, {self.doing}" if self.doing else f"step {self.steps}"


class Watch:
    """Beats for this worker and watches the others; one for a wire and all its lanes."""

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float, silence_s: float
    ) -> None:
        """`ranks`: of these workers in the default process group; `rank`: this one's place among them."""
        self.ranks = list(ranks)
        about = [socket.gethostname(), os.environ.get("THINWIRE_SITE", ""), os.getpid()]
        self._mesh = control.connect(store, f"thinwire/{name}/", rank, len(self.ranks), about, timeout_s)
        now_s = time.monotonic()
        self._members = [
            Member(rank, str(host), str(site), int(pid), heard_s=now_s)
            for rank, (host, site, pid) in enumerate(self._mesh.abouts)
        ]
        self._me = self._members[rank]
        self._others = [member for member in self._members if member is not self._me]
        self._beat_s = max(BEAT_S, len(self._others) / _MOST_BEATS_PER_S)
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._lost: PeerError | None = None
        self._listeners: list[Callable[[PeerError], None]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
        self._thread.start()
        atexit.register(self._say_left)

    @property
    def places(self) -> list[tuple[str, str]]:
        """Host and site of every worker."""
        return [(member.host, member.site) for member in self._members]

    @property
    def known_steps(self) -> list[int]:
        """Steps that each worker has last said to have done."""
        return [member.steps for member in self._members]

    @property
    def lost(self) -> PeerError | None:
        """Why training has ended, once it has."""
        return self._lost

    def when_lost(self, call: Callable[[PeerError], None]) -> None:
        """Call, from the watching thread or the one that rings, when a worker is lost."""
        with self._lock:
            self._listeners.append(call)

    def tell(self, steps: int, doing: str) -> None:
        """What this worker is doing, for others to know when they wait for it."""
        self._me.steps, self._me.doing = steps, doing

    def ring(self, error: PeerError) -> None:
        """Tell all workers why training ends here; the first cause each hears counts."""
        self._send_alarm(error)
        self._tell_listeners(error)

    def explain(self, error: BaseException) -> PeerError:
        """Which worker is behind a failed operation? One that is gone, or falls silent now."""
        asked_s = time.monotonic()
        while time.monotonic() < asked_s + _NOTICE_S:
            if self._lost is not None:
                return self._lost
            time.sleep(BEAT_S / 10)
        silent = [other for other in self._others if other.heard_s < asked_s and other.doing != "left"]
        if silent:
            return _silent(silent, "its connections broke")
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return self.missing(self._me.steps) or self.late(f"an operation failed: {cause}")

    def missing(self, steps: int) -> PeerError | None:
        """A worker that will not come to the step after `steps`: it has ended, or leaves before."""
        if self._lost is not None:  # whoever has ended since then did so because of this one
            return self._lost
        for other in self._others:
            if other.doing == "left":
                message = f"{other.name} has ended after step {other.steps} while others still train"
            elif other.doing == "detaching" and other.steps <= steps and self._me.doing != "detaching":
                message = f"{other.name} leaves after {other.steps} steps, this one is at step {steps + 1}"
            else:
                continue
            return PeerLost(
                message,
                rank=other.rank,
                host=other.host,
                hint="give all workers the same number of steps, or loop inside link.join(); a GradScaler "
                "may have left out steps there: use bfloat16",
            )
        return None

    def late(self, cause: str) -> PeerLate:
        """Nobody is dead: name the worker the others wait for, one that is not itself waiting."""
        there = [other for other in self._others if other.doing != "left"]
        if not there:
            return PeerLate(cause)
        behind = min(there, key=lambda other: (other.doing == "waiting", other.steps))
        return PeerLate(
            f"{cause}; {behind.name} is alive, at {behind.status}; this worker is at {self._me.status}",
            rank=behind.rank,
            host=behind.host,
            hint="look at what that worker is doing, loop inside link.join() if it has fewer batches, or "
            "raise timeout_s in attach",
        )

    def stop(self) -> None:
        """Say good-bye: from now on nobody misses this worker."""
        if self._stopped:
            return
        self._stopped = True
        self._thread.join()
        self._say_left()
        self._mesh.close()
        atexit.unregister(self._say_left)

    # -- inside -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_s = 0.0
            while not self._stopped and self._lost is None:
                now_s = time.monotonic()
                if now_s >= next_s:
                    self._mesh.send(["beat", self._me.steps, self._me.doing])
                    next_s = now_s + self._beat_s
                gone = any(other.gone_s is not None for other in self._others)
                self._mesh.poll(_GRACE_S if gone else max(0.0, next_s - now_s), self._hear, self._closed)
                self._judge(time.monotonic())
        except Exception as error:  # noqa: BLE001  # whoever is not watched any more must know it
            self._tell_listeners(PeerLost(f"worker {self._me.rank} cannot watch the others: {error!r}"))

    def _judge(self, now_s: float) -> None:
        """Ring if somebody has been gone or silent for too long, naming all who are."""
        there = [other for other in self._others if other.doing != "left"]
        gone = [other for other in there if other.gone_s is not None and now_s > other.gone_s + _GRACE_S]
        if gone:
            self.ring(_silent(gone, "its connections broke"))
        elif any(now_s > other.heard_s + self._silence_s for other in there):
            silent = [other for other in there if now_s > other.heard_s + self._silence_s / 2]
            self.ring(_silent(silent, f"no sign of life for {self._silence_s:g} s"))

    def _hear(self, rank: int, message: control.Message) -> None:
        member = self._members[rank]
        member.heard_s = time.monotonic()
        match message:
            case ["beat", int(steps), str(doing)]:
                member.steps, member.doing = steps, doing[:40]
            case ["alarm", bool(late), str(text), int() | None as culprit, str(host), str(hint)]:
                error = (PeerLate if late else PeerLost)(text, rank=culprit, host=host, hint=hint)
                self._tell_listeners(error)

    def _closed(self, rank: int) -> None:
        self._members[rank].gone_s = time.monotonic()

    def _send_alarm(self, error: PeerError) -> None:
        late = isinstance(error, PeerLate)
        self._mesh.send(["alarm", late, error.message[:4000], error.rank, error.host, error.hint[:4000]])

    def _say_left(self) -> None:
        """Good-bye, and before it the cause: who hears this first would take this worker for the culprit."""
        if self._lost is not None:
            self._send_alarm(self._lost)
        self._me.doing = "left"
        self._mesh.send(["beat", self._me.steps, "left"])

    def _tell_listeners(self, error: PeerError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            listeners = list(self._listeners)
        for call in listeners:
            call(error)


def _silent(members: Sequence[Member], how: str) -> PeerLost:
    first, rest = members[0], [f"worker {other.rank} on {other.host}" for other in members[1:]]
    also = f"; so are {', '.join(rest)}" if rest else ""
    return PeerLost(
        f"{first.name} is lost at {first.status}: {how}{also}",
        rank=first.rank,
        host=first.host,
        hint="see that worker's own output; it was killed, ran out of memory, froze or was cut off",
    )
