"""A gradient strategy as a communication hook of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from thinwire.engine import state
from thinwire.engine.attach import TIMEOUT_S
from thinwire.engine.bucket_plan import small_numel
from thinwire.engine.buckets import ParameterBucket, TrainingContext
from thinwire.engine.driver import Driver, ProgressThread, Task
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import SettingError, UsageError, check, check_seconds
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.connect import connect
from thinwire.wire.watch import SILENCE_S
from thinwire.wire.wire import Meter, Wire

SETTLING_STEPS = 2
"""Steps that go dense: DDP arranges its buckets anew after the first one, so only the second shows them."""


class HookState:
    """The state of a hook, one per DDP model; its residuals belong into a checkpoint of every rank.

    Save `state_dict()` of each rank. With as many ranks as before each loads its own by `load_state_dict`;
    with another number each calls `resize` with all of them.
    """

    def __init__(self, strategy: Strategy, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        lane = connect(process_group, timeout_s, SILENCE_S)
        if lane is None:
            raise UsageError(
                "ddp_hook needs a process group, and there is none",
                hint="make it after init_process_group and DistributedDataParallel(model)",
            )
        self.strategy = strategy
        self.steps = 0
        """Backward passes that were reduced."""
        self._lane = lane
        self._endpoint = Endpoint(lane, Meter())
        self._progress = ProgressThread("thinwire-ddp-hook")
        self._driver = Driver(self._progress.soon, self._progress.soon)
        self._context = TrainingContext()
        self._seen: list[list[Any]] = []
        """The parameters of every bucket of the step under way."""
        self._buckets: list[ParameterBucket] = []
        self._state: Any = None
        self._saved: Sequence[dict[str, Any]] = ()
        """States of all ranks to go on with, once there are buckets for them."""
        self._steps_before = 0
        """Steps of the strategy in the run that the state comes from."""

    # -- reducing -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over workers of a bucket's gradients, or what the strategy makes of it."""
        if bucket.index() == 0:
            if self.steps >= SETTLING_STEPS and not self._buckets:
                self._init()
            self._seen = []
        self._seen.append(bucket.parameters())
        self._context.step = self._strategy_steps + 1
        if bucket.is_last():
            self.steps += 1
        if not self._buckets:
            return self._dense(bucket.buffer())
        own, tensors = self._own(bucket)
        own.fill_(tensors)
        task = self._endpoint.start(
            self._driver,
            "reduce",
            lambda wire: self.strategy.reduce(own, self._state, wire),
            f"reduce {own.index}",
        )
        return _future(task, lambda: own.empty_into_(tensors), bucket.buffer())

    def _own(self, bucket: GradBucket) -> tuple[ParameterBucket, list[Tensor]]:
        """The strategy's bucket for one of DDP's, and the gradients in its order."""
        if bucket.index() < len(self._buckets):
            own, now, gradients = self._buckets[bucket.index()], bucket.parameters(), bucket.gradients()
            if [p.shape for p in own.parameters] == [now[i].shape for i in own.order]:
                return own, [gradients[i] for i in own.order]
        raise UsageError(
            f"DDP has other buckets in step {self.steps} than in step {SETTLING_STEPS}",
            hint="register the hook anew after freezing or adding parameters",
        )

    @property
    def _strategy_steps(self) -> int:
        """Steps that the strategy has done, also before an interruption."""
        return self._steps_before + max(0, self.steps - SETTLING_STEPS)

    def _dense(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        async def reduce(wire: Wire) -> None:
            await wire.all_reduce_(buffer)
            buffer.div_(wire.world_size)

        return _future(self._endpoint.start(self._driver, "reduce", reduce), lambda: None, buffer)

    def _init(self) -> None:
        small = small_numel(p for parameters in self._seen for p in parameters)
        self._buckets = []
        for index, parameters in enumerate(self._seen):
            shapes = [tuple(p.shape) for p in parameters]
            names = [
                f"parameter {n} of shape {shape} in bucket {index} of DDP" for n, shape in enumerate(shapes)
            ]
            self._buckets.append(ParameterBucket(index, names, parameters, small, self._context))
        self._state = self.strategy.init(self._buckets, self._endpoint.wire())
        if self._saved:
            self._load(self._saved)
            self._saved = ()

    def _load(self, saved: Sequence[dict[str, Any]]) -> None:
        rank, world_size = self._lane.rank, self._lane.world_size
        (self._state,) = state.load_all(saved, self._buckets, [self._state], rank, world_size)
        self._steps_before += int(saved[0]["steps"]) - self._strategy_steps
        self._context.step = self._strategy_steps + 1

    # -- saving -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of this rank that must survive a stop."""
        if self._state is None:  # nothing of its own yet, so what it was given
            if len(self._saved) == self._lane.world_size:
                return self._saved[self._lane.rank]
            return {"strategy": repr(self.strategy), "loaded": list(self._saved)}
        return state.dump_all(self.strategy, self._strategy_steps, self._buckets, [self._state])

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with what this rank has saved; it takes effect when DDP's buckets are known."""
        self.resize([saved] * self._lane.world_size)

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on with this rank's share of what another number of ranks has saved, given in their order."""
        state.check_strategy(saved, self.strategy)
        saved = saved[0].get("loaded", saved)  # saved before DDP's buckets were known
        if not saved:
            return
        if self._state is None:
            self._saved = saved
        else:
            self._load(saved)

    def close(self) -> None:
        """Give back threads and connections, when training is over."""
        self._progress.stop()
        self._lane.close()


def ddp_hook(
    strategy: Strategy, *, process_group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[HookState, Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]]:
    """Make the state and the hook for `register_comm_hook` of a DDP model; called by all ranks.

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
    if isinstance(strategy, type) or not hasattr(strategy, "replicas_agree"):
        raise SettingError(
            f"strategy must be a strategy object, got {strategy!r}",
            hint="for example tw.ddp_hook(tw.GTopK(density=0.001))",
        )
    check_seconds("timeout_s", timeout_s)
    if getattr(strategy, "keep_rate", False):
        raise SettingError(
            f"{type(strategy).__name__}.keep_rate must be False where the optimizer is not known, got True",
            hint="join it by tw.attach(model, optimizer, ...), which knows the learning rate",
        )
    others = any(overrides(strategy, seam) for seam in ("mix", "serve", "settle"))
    reduces = overrides(strategy, "reduce") and not others and strategy.overlap != "forward"
    hint = "for others, use thinwire.attach instead of DistributedDataParallel"
    check(reduces, "strategy", "one that has gradients reduced when backward ends", strategy, hint=hint)
    return HookState(strategy, process_group, timeout_s), HookState.reduce


# DDP compares annotations with types, not with the text that they are in this file.
HookState.reduce.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def _future(task: Task, finish: Callable[[], None], result: Tensor) -> torch.futures.Future[Tensor]:
    """A future with `result`, once the task has ended and `finish` has run; or with the task's error."""
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
