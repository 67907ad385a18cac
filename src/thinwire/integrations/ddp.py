"""A gradient strategy as a communication hook of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from thinwire.engine import state as plain
from thinwire.engine.attach import TIMEOUT_S
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import ProgressThread, Task
from thinwire.errors import DataError, SettingError, UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.process_group import connect

SETTLING_STEPS = 2
"""Steps that go dense: DDP arranges its buckets anew after the first one, so only the second shows them."""

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Place:
    """A bucket of DDP as a strategy sees it: small tensors last."""

    bucket: ParameterBucket
    order: list[int]
    """Which of DDP's tensors each of the bucket's is."""

    @classmethod
    def of(cls, index: int, parameters: Sequence[Any]) -> _Place:
        names = [f"a parameter of shape {tuple(p.shape)} in bucket {index} of DDP" for p in parameters]
        order = sorted(range(len(parameters)), key=lambda i: parameters[i].dim() <= 1)
        return cls(ParameterBucket(index, names, parameters), order)

    def tensors(self, bucket: GradBucket) -> list[Tensor]:
        gradients = bucket.gradients()
        return [gradients[i] for i in self.order]


class HookState:
    """The state of a hook, one per DDP model; its residuals belong into a checkpoint of every rank.

    Save `state_dict()` of each rank. With as many ranks as before each loads its own by `load_state_dict`;
    with another number each calls `resize` with all of them.
    """

    def __init__(self, strategy: Strategy, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        wire = connect(process_group, timeout_s)
        if wire is None:
            raise UsageError(
                "ddp_hook needs a process group, and there is none",
                hint="make it after init_process_group and DistributedDataParallel(model)",
            )
        self.strategy = strategy
        self.steps = 0
        """Backward passes that were reduced."""
        self._wire = wire
        self._progress = ProgressThread("thinwire-ddp-hook")
        self._seen: list[list[Any]] = []
        """The parameters of every bucket of the step under way."""
        self._places: list[_Place] = []
        self._state: Any = None
        self._saved: Any = None
        """A state to go on with, once there are buckets for it."""

    # -- reducing -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over workers of a bucket's gradients, or what the strategy makes of it."""
        if bucket.index() == 0:
            if self.steps >= SETTLING_STEPS and not self._places:
                self._init()
            self._seen = []
        self._seen.append(bucket.parameters())
        if bucket.is_last():
            self.steps += 1
        if not self._places:
            return self._dense(bucket.buffer())
        place = self._places[bucket.index()] if bucket.index() < len(self._places) else None
        if place is None or _shapes(place.bucket.parameters) != _shapes(
            [self._seen[-1][i] for i in place.order]
        ):
            raise UsageError(
                f"DDP has other buckets in step {self.steps} than in step {SETTLING_STEPS}",
                hint="register the hook anew after freezing or adding parameters",
            )
        tensors = place.tensors(bucket)
        place.bucket.fill_(tensors)

        def finish() -> None:
            place.bucket.empty_into_(tensors)

        task = self._progress.driver.start(
            self.strategy.reduce(place.bucket, self._state, self._wire), f"reduce {bucket.index()}"
        )
        return _future(task, finish, bucket.buffer())

    def _dense(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        async def reduce() -> None:
            await self._wire.all_reduce_(buffer)
            buffer.div_(self._wire.world_size)

        return _future(self._progress.driver.start(reduce(), "reduce"), lambda: None, buffer)

    def _init(self) -> None:
        self._places = [_Place.of(index, parameters) for index, parameters in enumerate(self._seen)]
        self._state = self.strategy.init([place.bucket for place in self._places], self._wire)
        if self._saved is not None:
            self._state, self._saved = plain.load(self._state, self._saved), None

    # -- saving -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What must survive a stop, for this rank."""
        state = self._saved if self._state is None else plain.dump(self._state)
        return {"strategy": repr(self.strategy), "state": state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with what this rank has saved; it takes effect when DDP's buckets are known."""
        if saved["strategy"] != repr(self.strategy):
            raise DataError(
                f"the saved state is of {saved['strategy']}, this hook has {self.strategy!r}",
                hint="make the hook with the strategy the state was saved with",
            )
        if self._state is None:
            self._saved = saved["state"]
        elif saved["state"] is not None:
            self._state = plain.load(self._state, saved["state"])

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on with this rank's share of what another number of ranks has saved, given in their order."""
        states = [each["state"] for each in saved]
        wire = self._wire
        state = None if states[0] is None else self.strategy.resize(states, wire.rank, wire.world_size)
        self.load_state_dict({**saved[0], "state": state})

    def close(self) -> None:
        """Give back threads and connections, when training is over."""
        self._progress.stop()
        self._wire.close()


def ddp_hook(
    strategy: Strategy, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[HookState, Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]]:
    """What `register_comm_hook` of a DDP model wants: a state and a hook; called by all ranks.

    The model stays wrapped in DDP, and its gradients travel the way `strategy` says. The first two steps go
    dense, since DDP arranges its buckets anew after the first. The hook does not see the optimizer: with a
    strategy that has momentum of its own, give the optimizer none.

        model = DistributedDataParallel(model)
        model.register_comm_hook(*tw.ddp_hook(tw.GTopK(density=0.001)))

    Args:
        strategy: one that reduces gradients.
        process_group: that of the DDP model, if it has one of its own.
        timeout_s: how long to wait for a worker before giving up.
    """
    if strategy.seams != {"reduce"} or strategy.overlap == "forward":
        raise SettingError(
            f"strategy must be one that has gradients reduced when backward ends, got {strategy!r}",
            hint="for others, use thinwire.attach instead of DistributedDataParallel",
        )
    return HookState(strategy, process_group, timeout_s), _reduce


def _reduce(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


# DDP compares annotations with types, not with the text that they are in this file.
_reduce.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def _future(task: Task, finish: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
    """Of `result`, once the task has ended and `finish` has run; or of the task's error."""
    ended: torch.futures.Future[None] = torch.futures.Future(
        devices=None if result.is_cpu else [result.device]
    )

    def then(_: torch.futures.Future[None]) -> Tensor:
        if task.error is not None:
            raise task.error
        finish()
        return result

    reduced = ended.then(then)
    task.when_done(lambda: ended.set_result(None))
    return reduced


def _shapes(parameters: Sequence[Tensor]) -> Shapes:
    return [tuple(p.shape) for p in parameters]
