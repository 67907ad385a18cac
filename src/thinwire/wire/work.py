"""What a strategy's coroutine may await: a `Work`, `any_of` several, `in_background` and `training_thread`.

No event loop is involved: a driver steps the coroutine with `send` (see engine/driver.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any


class Work:
    """An operation under way. It ends once, from any thread, by `finish` or `fail`."""

    __slots__ = ("__weakref__", "_callbacks", "_ended", "_error", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

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

    def follow(self, other: Work) -> None:
        """End when `other` does, and as it does."""
        other.when_done(lambda: self._end(other.error))

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._error = error
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call once it has ended, in the thread that ends it; at once if it already has."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

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


def finished() -> Work:
    """A work that has already ended."""
    work = Work()
    work.finish()
    return work


def after(seconds: float) -> Work:
    """A work that ends after so many seconds, or when somebody finishes it before."""
    work = Work()
    timer = threading.Timer(seconds, work.finish)
    timer.name, timer.daemon = "thinwire-timer", True
    work.when_done(timer.cancel)
    timer.start()
    return work


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


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What `any_of` gives."""

    works: Sequence[Work]

    def __await__(self) -> Generator[AnyOf, int, int]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class InBackground:
    """What `in_background` gives: a promise to training."""

    due: int
    slack: float

    def __await__(self) -> Generator[InBackground, Any, None]:
        yield self


@dataclass(frozen=True, slots=True)
class TrainingThread:
    """What `training_thread` gives."""

    def __await__(self) -> Generator[TrainingThread, float, float]:
        return (yield self)


def any_of(works: Sequence[Work]) -> AnyOf:
    """Await the first of several works; gives its index. Look at its `error` before using it."""
    return AnyOf(works)


def in_background(*, due: int = 1, slack: float = 0) -> InBackground:
    """Resume beside training, which needs the result before the optimizer step `due` steps ahead.

    Training may run `slack` steps past that without it (`math.inf`: it never waits). The promise is given
    here and not when coming back, because training must decide right after its step whether to wait.
    """
    return InBackground(due, slack)


def training_thread() -> TrainingThread:
    """Resume in the training thread, on its CUDA stream: the only place where parameters may be written.

    That is before the step promised to `in_background`, or as soon as training waits. Legal anywhere, also
    without having left. Gives the seconds training waited for this, 0.0 if it did not.
    """
    return TrainingThread()
