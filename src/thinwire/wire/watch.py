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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerDiffers, PeerError, PeerLate, PeerLost
from thinwire.wire import control
from thinwire.wire.base import FAILING, LEFT, Status
from thinwire.wire.patience import BEAT_S as BEAT_S  # tests set it here
from thinwire.wire.patience import Patience

SILENCE_S = 10.0
"""Unless a user says otherwise."""
_NOTICE_S = 4 * BEAT_S
_GRACE_S = 0.3
"""A worker that stops with an error says so before its connection breaks."""
_MOST_BEATS_PER_S = 64
_LONGEST = 300
"""Characters of a status."""
_KINDS = {kind.__name__: kind for kind in (PeerLost, PeerLate, PeerDiffers)}
"""Errors that an alarm can carry."""


@dataclass(slots=True)
class WatchedWorker:
    """What is known of one worker."""

    rank: int
    host: str
    site: str
    pid: int
    status: Status = field(default_factory=Status)
    heard_s: float = 0.0
    """When it was last heard of."""
    gone_s: float | None = None
    """When its connection broke."""

    @property
    def name(self) -> str:
        return f"worker {self.rank} on {self.host} (pid {self.pid})"

    @property
    def has_left(self) -> bool:
        return self.status.doing == LEFT


class Watch:
    """Beats for this worker and watches the others; one for a wire and all its lanes."""

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float, silence_s: float
    ) -> None:
        """`ranks`: of these workers in the default process group; `rank`: this one's place among them."""
        self.ranks = list(ranks)
        about = [socket.gethostname(), os.environ.get("THINWIRE_SITE", ""), os.getpid()]
        self._mesh = control.connect(store, f"thinwire/{name}/", rank, len(self.ranks), about, timeout_s)
        self._patience = Patience(silence_s)
        self._mesh.break_after(self._patience.unanswered_s)
        now_s = time.monotonic()
        self._members = [
            WatchedWorker(rank, str(host), str(site), int(pid), heard_s=now_s)
            for rank, (host, site, pid) in enumerate(self._mesh.abouts)
        ]
        self._me = self._members[rank]
        self._others = [member for member in self._members if member is not self._me]
        self._beat_s = max(BEAT_S, len(self._others) / _MOST_BEATS_PER_S)
        self._lock = threading.Lock()
        self._lost: PeerError | None = None
        self._looked_s = now_s
        """All that had come by then is known."""
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
        return [member.status.steps for member in self._members]

    @property
    def lost(self) -> PeerError | None:
        """Why training has ended, once it has."""
        return self._lost

    def when_lost(self, call: Callable[[PeerError], None]) -> None:
        """Call, from the watching thread or the one that rings, when a worker is lost."""
        with self._lock:
            self._listeners.append(call)
        if self._lost is not None:
            self._tell_listeners()

    def tell(self, status: Status) -> None:
        """What this worker is doing, for others to know when they wait for it."""
        self._me.status = status

    def ring(self, error: PeerError) -> PeerError:
        """Tell all workers why training ends here; the first cause each hears counts, and is returned."""
        if (first := self._claim(error)) is error:
            self._send_alarm(error)
            self._tell_listeners()
        return first

    def explain(self, error: BaseException) -> PeerError:
        """Which worker is behind a failed operation? One that is gone, or falls silent now.

        Whoever ends because of another has said so before it closes a connection. So when all is known that
        has come since, and everybody was heard of again, nobody is gone.
        """
        asked_s = time.monotonic()
        while self._lost is None and not self._stopped:
            silent = any(other.heard_s < asked_s and not other.has_left for other in self._others)
            if self._looked_s > asked_s + _NOTICE_S and not silent:
                break
            time.sleep(BEAT_S / 10)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return self.missing() or self.late(f"an operation failed: {cause}")

    def missing(self, awaited_step: int = 0) -> PeerError | None:
        """A worker that will not come to where this one waits: it has ended, leaves, or is in a call of the
        link that this worker has left out. `awaited_step`: a step whose mixing this worker waits for."""
        error = next(filter(None, (self._absence(other, awaited_step) for other in self._others)), None)
        return self._lost or error  # whoever has ended meanwhile did so because of the one that is lost

    def _absence(self, other: WatchedWorker, awaited_step: int) -> PeerError | None:
        mine, theirs = self._me.status, other.status
        kind: type[PeerError] = PeerLost
        hint = (
            "give all workers the same number of steps, or loop inside link.join(); a GradScaler may have "
            "left out steps there: use bfloat16"
        )
        goes_on = mine.doing != "" and not mine.leaves
        leaves_early = theirs.leaves and theirs.steps < (mine.steps + 1 if goes_on else awaited_step)
        if other.has_left:
            message = f"{other.name} has ended after step {theirs.steps} while others still train"
        elif leaves_early and theirs.doing.startswith(FAILING):
            message = f"{other.name} left at step {theirs.steps} with {theirs.doing.removeprefix(FAILING)}"
            hint = "see that worker's own output"
        elif leaves_early:
            here = f"this one is at step {mine.steps + 1}" if goes_on else f"this one after {mine.steps}"
            message = f"{other.name} leaves after {theirs.steps} steps, {here}"
        elif mine.is_beyond(theirs):
            kind = PeerDiffers
            message = (
                f"{other.name} is {theirs.doing} at step {theirs.steps}, and worker {self._me.rank} has gone "
                f"on to step {mine.steps + 1} without it"
            )
            hint = "all workers call the methods of a link, at the same point of the program"
        else:
            return None
        return kind(message, rank=other.rank, host=other.host, hint=hint)

    def late(self, cause: str) -> PeerLate:
        """Nobody is dead: name the worker the others wait for, one that is on its own, or else one that is
        where few are."""
        there = [other for other in self._others if not other.has_left]
        if not there:
            return PeerLate(cause)
        places = Counter(member.status.doing for member in (*there, self._me))

        def patience(other: WatchedWorker) -> tuple[bool, int, int]:
            return other.status.doing != "", places[other.status.doing], other.status.steps

        behind = min(there, key=patience)
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
                    self._mesh.send(["beat", *self._me.status])
                    next_s = now_s + self._beat_s
                gone = any(other.gone_s is not None for other in self._others)
                self._mesh.poll(_GRACE_S if gone else max(0.0, next_s - now_s), self._hear, self._closed)
                self._judge(time.monotonic())
                self._looked_s = now_s
        except Exception as error:  # noqa: BLE001  # whoever is not watched any more must know it
            self._claim(PeerLost(f"worker {self._me.rank} cannot watch the others: {error!r}"))
            self._tell_listeners()

    def _judge(self, now_s: float) -> None:
        """Ring if somebody has been gone or silent for too long, naming all who are."""
        there = [other for other in self._others if not other.has_left]
        gone = [other for other in there if other.gone_s is not None and now_s > other.gone_s + _GRACE_S]
        if gone:
            self.ring(_silent(gone, "its connections broke"))
        elif any(now_s > other.heard_s + self._patience.silence_s for other in there):
            silent = [other for other in there if now_s > other.heard_s + self._patience.ask_s]
            silent.sort(key=lambda other: other.heard_s)  # others may only be slow to beat, on a busy machine
            self.ring(_silent(silent, f"no sign of life for {self._patience.silence_s:g} s"))

    def _hear(self, rank: int, message: control.Message) -> None:
        member = self._members[rank]
        member.heard_s = time.monotonic()
        match message:
            case ["beat", int(steps), int(passes), int(calls), str(doing)]:
                member.status = Status(steps, passes, calls, doing[:_LONGEST])
            case ["alarm", str(kind), str(text), int() | None as culprit, str(host), str(hint)]:
                self._claim(_KINDS.get(kind, PeerLost)(text, rank=culprit, host=host, hint=hint))
                self._tell_listeners()

    def _closed(self, rank: int) -> None:
        self._members[rank].gone_s = time.monotonic()

    def _send_alarm(self, error: PeerError) -> None:
        kind, text, hint = type(error).__name__, error.message[:4000], error.hint[:4000]
        self._mesh.send(["alarm", kind, text, error.rank, error.host, hint])

    def _say_left(self) -> None:
        """Good-bye, and before it the cause: who hears this first would take this worker for the culprit."""
        if self._lost is not None:
            self._send_alarm(self._lost)
        self._me.status = self._me.status._replace(doing=LEFT)
        self._mesh.send(["beat", *self._me.status])

    def _claim(self, error: PeerError) -> PeerError:
        """The first cause, which is this one if there was none."""
        with self._lock:
            self._lost = self._lost or error
            return self._lost

    def _tell_listeners(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for call in listeners:
            assert self._lost is not None
            call(self._lost)


def _silent(members: Sequence[WatchedWorker], how: str) -> PeerLost:
    first, rest = members[0], [f"worker {other.rank} on {other.host}" for other in members[1:]]
    also = f"; so are {', '.join(rest)}" if rest else ""
    return PeerLost(
        f"{first.name} is lost at {first.status}: {how}{also}",
        rank=first.rank,
        host=first.host,
        hint="see that worker's own output; it was killed, ran out of memory, froze or was cut off",
    )
