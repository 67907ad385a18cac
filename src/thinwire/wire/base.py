"""The wire all traffic passes through, and what a strategy's coroutine may await.

    await work                  go on when it is done, beside training
    await any_of(works)         go on with the index of the first one done
    await take_off(after=1)     leave the calling thread: go on beside training, which needs the
                                result before the optimizer step `after` steps ahead
    await land()                come back: go on in the training thread, just before that step; gives the
                                seconds training has waited for it

No event loop is involved: a driver steps the coroutine with `send` (see engine/driver.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.errors import PeerError, PeerLate


class Work:
    """Something under way. It ends once, from any thread, by `finish` or `fail`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._calls: list[Callable[[], object]] = []

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is under way or when it went well."""
        return self._error

    def finish(self) -> None:
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """End with an error, which is raised in whoever waits. The first ending counts."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._error = error
            self._ended = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call once it has ended, in the thread that ends it; at once if it already has."""
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                return
        call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended, raising its error; False if `timeout_s` ran out first."""
        if not self._ended:
            ended = threading.Event()
            self.when_done(ended.set)
            if not ended.wait(timeout_s):
                return False
        if self._error is not None:
            raise self._error
        return True

    def __await__(self) -> Generator[Work, Any, None]:
        yield self
        if self._error is not None:
            raise self._error


def all_of(works: Sequence[Work]) -> Work:
    """A work that ends when all of these have, with the first error among them."""
    together, left, lock = Work(), len(works), threading.Lock()

    def ended(work: Work) -> None:
        nonlocal left
        if work.error is not None:
            together.fail(work.error)
        with lock:
            left -= 1
            last = left == 0
        if last:
            together.finish()

    for work in works:
        work.when_done(lambda work=work: ended(work))  # type: ignore[misc]  # mypy: lambda default
    return together if works else finished()


def finished() -> Work:
    """A work that needs no doing."""
    work = Work()
    work.finish()
    return work


@dataclass(frozen=True, slots=True)
class AnyOf:
    works: Sequence[Work]

    def __await__(self) -> Generator[AnyOf, int, int]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class TakeOff:
    after: int
    late: float

    def __await__(self) -> Generator[TakeOff, Any, None]:
        yield self


@dataclass(frozen=True, slots=True)
class Land:
    def __await__(self) -> Generator[Land, float, float]:
        return (yield self)


def any_of(works: Sequence[Work]) -> AnyOf:
    """Await the first of several works; gives its index. Look at its `error` before using it."""
    return AnyOf(works)


def take_off(*, after: int = 1, late: float = 0) -> TakeOff:
    """Go on beside training, which needs the result before the step `after` steps ahead.

    Training may run `late` steps past that without it (`math.inf`: it never waits).
    """
    return TakeOff(after, late)


def land() -> Land:
    """Go on in the training thread, just before the step promised at take-off.

    Gives the seconds the training thread has waited for this, 0.0 if it was there in time.
    """
    return Land()


class Wire(Protocol):
    """An ordered channel between workers.

    Every worker issues the same collectives in the same order, and they end in that order.
    Exchanges are matched by peers and tag and are free of that order. A buffer under way is
    neither written to nor, if it is being received, read.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_reduce_(self, data: Tensor) -> Work:
        """Sum `data` over all workers, in place."""
        ...

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        """Sum `data` over all workers; this worker's part of the sum ends in `out`."""
        ...

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        """Put every worker's `data` (of equal size) into `out`, in order of rank."""
        ...

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        """Send the i-th part of `data` to worker i; the part from worker i ends in part i of `out`."""
        ...

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        """Overwrite `data` with that of worker `source`."""
        ...

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        """Send to one peer and receive from one, at the same time; either half may be absent.

        To receive without a `source` is to receive from whoever sends with this tag first.
        """
        ...

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> Wire:
        """Another channel, for all workers or for `ranks`; made in `init` only, by all its members."""
        ...

    def now(self) -> float:
        """Seconds on the clock that this wire's works end by; only differences mean something."""
        ...

    def tell(self, status: str) -> None:
        """What this worker is doing ("step 17"), for peers that wait for it and give up."""
        ...

    def late(self, cause: str) -> PeerLate:
        """The error for having waited too long, naming the worker that is furthest behind."""
        ...

    def fail(self, error: PeerError) -> None:
        """End everything under way with `error`, on all lanes and all workers; nothing starts after it."""
        ...

    def close(self) -> None:
        """Give back threads and connections; nothing may be under way."""
        ...
