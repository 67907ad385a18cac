"""Sends buckets out in their fixed order, and has the gradients back before backward returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from thinwire.engine.backward_hooks import BackwardHooks
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import Task
from thinwire.engine.refusal import Refusal
from thinwire.engine.sparse_rows import SparseRows
from thinwire.strategies.base import Gradients, Overlap
from thinwire.wire.work import Work, all_of


class Launcher(Protocol):
    """How gradients are sent and awaited; the core supplies it."""

    @property
    def refusal(self) -> Refusal: ...
    def reduce(self, bucket: Gradients, place: int) -> Task: ...
    def reduce_rows(self, rows: SparseRows, weight: float) -> Task: ...
    def send_buffers(self) -> None: ...
    def receiving_buffers(self) -> Iterator[Work]: ...
    def wait_for(self, works: Iterable[Work]) -> None: ...
    def background(self, call: Callable[[], None]) -> None: ...
    def agree(self, order: list[tuple[int, int]]) -> list[tuple[int, int]]: ...


class BackwardReducer:
    """Gradients are final when `backward()` returns."""

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        overlap: Overlap,
        launcher: Launcher,
        rows: Sequence[SparseRows] = (),
    ) -> None:
        self.weight = 1.0
        """How much this worker's gradient counts in the coming pass."""
        others = [each.parameter for each in rows]
        self.hooks = BackwardHooks(buckets, self, announce=overlap == "backward", others=others)
        self._buckets, self._rows = buckets, rows
        self._launcher = launcher
        self._full: set[int] = set()
        self._tasks: list[Work] = []
        self._unused: _Witness | None = None
        """The last pass, while no step has used its gradients."""

    def backward_begins(self) -> None:
        if self._unused is not None and self._unused.was_dropped():
            for bucket in self._buckets:
                bucket.undo_()
        self._full.clear()
        self._tasks.clear()
        self._launcher.send_buffers()

    def bucket_is_full(self, index: int) -> None:
        self._full.add(index)
        while len(self._tasks) in self._full:
            self._send()

    def backward_ends(self) -> None:
        self._launcher.wait_for(self.finishing())

    def finishing(self) -> Iterator[Work]:
        """What to wait for, one after another, until the gradients are final."""
        while len(self._tasks) < len(self._buckets):
            self._send()
        for task, bucket in zip(self._tasks, self._buckets, strict=True):
            if not bucket.gradient.is_cpu:
                yield task
                bucket.scatter_([p.grad for p in bucket.parameters])
        yield all_of(self._tasks)  # one after another would wake this thread for each
        for rows in self._rows:
            yield self._launcher.reduce_rows(rows, self.weight)
        yield from self._launcher.receiving_buffers()
        if (yield from self._launcher.refusal.elsewhere()):
            for bucket in self._buckets:
                bucket.refuse_(p.grad for p in bucket.parameters if p.grad is not None)
        self.weight = 1.0
        self._unused = _Witness.among(self._buckets)

    def _send(self) -> None:
        bucket = self._buckets[len(self._tasks)]
        own = bucket.gather_(self.weight)
        task = self._launcher.reduce(bucket, bucket.place)
        self._tasks.append(self._scattered(task, bucket, own) if bucket.gradient.is_cpu else task)

    def _scattered(self, task: Task, bucket: ParameterBucket, own: Sequence[Tensor | None]) -> Work:
        """Ends when the gradients are back, which happens where the task ends: beside backward.

        Not for other devices, where only the training thread knows the stream that backward uses.
        """
        work = Work()

        def scatter() -> None:
            try:
                if task.error is not None:
                    raise task.error
                bucket.scatter_(own)
            except BaseException as error:  # noqa: BLE001  # raised in the training thread, which waits
                work.fail(error)
            else:
                work.finish()

        task.when_done(scatter)
        return work

    def reduce_nothing(self) -> float:
        """Take part in the others' reduction with nothing to add; gives how much they counted, on average."""
        self.backward_begins()
        for bucket in self._buckets:
            bucket.flat.fill_nothing_()
            self._tasks.append(self._launcher.reduce(bucket, bucket.place))
        rows = (self._launcher.reduce_rows(each, 0.0) for each in self._rows)
        self._launcher.wait_for(chain(self._tasks, rows, self._launcher.receiving_buffers()))
        return self._buckets[0].flat.mean_weight() if self._buckets else self._rows[0].mean_weight

    def hook(self) -> None:
        self.hooks.hook()

    def unhook(self) -> None:
        self.hooks.unhook()

    def check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Whatever way of stepping is fine: the gradients are there."""

    def record_step(self) -> None:
        """The step has been made."""
        self._unused = None

    def stepping(self) -> Iterator[Work]:
        """What to wait for until every step that was asked for is made: nothing is ever put off here."""
        return iter(())

    def reducing(self) -> Iterator[Work]:
        """What to wait for before `gradients`: nothing, they are final."""
        return iter(())

    def gradients(self) -> AbstractContextManager[None]:
        """The gradients are the parameters' own anyway."""
        return nullcontext()

    def give_back(self) -> None:
        """Nothing is ever kept here."""


@dataclass(frozen=True, slots=True)
class _Witness:
    """The last parameter that got a gradient: it shows whether somebody has dropped the gradients since."""

    parameter: Tensor
    gradient: Tensor
    version: int

    @classmethod
    def among(cls, buckets: Sequence[ParameterBucket]) -> _Witness | None:
        for bucket in reversed(buckets):
            for parameter in reversed(bucket.parameters):
                if (gradient := parameter.grad) is not None:
                    return cls(parameter, gradient, gradient._version)
        return None

    def was_dropped(self) -> bool:
        """Whether it was taken off or set to zero; asked when backward has begun, and not come here yet."""
        if self.parameter.grad is not self.gradient:
            return True
        return self.gradient._version != self.version and not bool(self.gradient.any())
