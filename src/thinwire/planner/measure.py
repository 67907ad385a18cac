"""Measures the steps of any torch training loop as it is: forward, backward, when each gradient comes, and
the optimizer's step.

A recorder looks on from torch's own hooks: around `torch.autograd.backward`, where a gradient is complete,
and around an optimizer's step. The loop is not changed, and its numbers are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.engine.optimizer import is_normalised
from thinwire.errors import UsageError
from thinwire.planner.workload import FORWARD_SHARE, Workload
from thinwire.units import count

WARM_UP = 3
"""Steps that are not timed: the first ones allocate, compile and connect."""
STEPS = 10
LEAST_STEPS = WARM_UP + 2
"""Fewest steps of a loop that ends early."""


@dataclass(slots=True)
class _Step:
    """One step, by the clock."""

    began_s: float
    """Start of the optimizer's own part; `ended_s` is its end."""
    ended_s: float
    backward_s: float | None
    """Time at which its last backward began; None: there was none that torch runs."""
    arrivals: dict[int, float]
    """Time at which each parameter's gradient was last complete."""


@dataclass(slots=True)
class StepRecorder:
    """Records steps of the first optimizer that makes one."""

    parameters: list[Tensor] = field(default_factory=list)
    timed: Callable[[], object] | None = None
    """Called whenever there are enough new steps for `workload`; what it raises ends the loop."""
    _optimizer: Optimizer | None = None
    _steps: list[_Step] = field(default_factory=list)
    _backward_s: float | None = None
    _began_s: float = 0.0
    _arrivals: dict[int, float] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @contextmanager
    def recording(self) -> Iterator[StepRecorder]:
        """Look on inside the block."""
        plain = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self._backward_s = _now()
            plain(*args, **kwargs)

        def steps(optimizer: Optimizer, args: object, kwargs: object) -> None:
            self._began_s = _now()

        handles = [register_optimizer_step_pre_hook(steps), register_optimizer_step_post_hook(self._stepped)]
        torch.autograd.backward = backward
        try:
            yield self
        finally:
            torch.autograd.backward = plain
            for each in (*handles, *self._handles):
                each.remove()
            self._handles.clear()

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(self.parameters):
                if parameter.requires_grad and parameter.is_leaf:
                    hook = self._arrived(index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        elif optimizer is not self._optimizer:
            return  # a second model; the first one's steps are what is timed
        self._steps.append(_Step(self._began_s, _now(), self._backward_s, self._arrivals))
        self._backward_s, self._arrivals = None, {}
        if self.timed is not None and self.num_steps == WARM_UP + STEPS + 1:
            self.timed()
            del self._steps[:-1]

    def _arrived(self, index: int) -> Any:
        def hook(parameter: Tensor) -> None:
            self._arrivals[index] = _now()

        return hook

    def workload(self, name: str, *, batch: int | None = None) -> Workload:
        """The recorded workload, by lower quartiles over steps: other programs may use the processor too."""
        if not self.num_steps:
            raise UsageError(f"{name} made 0 optimizer steps: there is nothing to time")
        if self.num_steps < LEAST_STEPS:
            rule = f"{LEAST_STEPS} are needed, of which the first {WARM_UP} are not timed"
            raise UsageError(f"{name} made only {count(self.num_steps, 'optimizer step')}: {rule}")
        timed = self._steps[WARM_UP:]
        pairs = list(pairwise(timed))
        whole_s = _low_quartile([after.ended_s - before.ended_s for before, after in pairs])
        begun = [(b.ended_s, a.backward_s) for b, a in pairs if a.backward_s is not None]
        if len(begun) == len(pairs):
            forward_s = min(_low_quartile([at - ended_s for ended_s, at in begun]), whole_s)
        else:
            forward_s = whole_s * FORWARD_SHARE
        optimizer_s = 0.0
        if all(a.backward_s is None or a.backward_s <= a.began_s for _, a in pairs):  # not in a closure
            optimizer_s = min(_low_quartile([a.ended_s - a.began_s for _, a in pairs]), whole_s - forward_s)
        used = [i for i in range(len(self.parameters)) if any(i in step.arrivals for step in timed)]
        used = used or list(range(len(self.parameters)))
        return Workload(
            name=name,
            shapes=tuple(tuple(self.parameters[i].shape) for i in used),
            shares=_shares([step for step in timed if step.backward_s is not None], used),
            forward_s=forward_s,
            backward_s=whole_s - forward_s - optimizer_s,
            optimizer_s=optimizer_s,
            batch=batch,
            normalised=self._optimizer is not None and is_normalised(self._optimizer),
            on_processor=all(self.parameters[i].device.type == "cpu" for i in used),
        )


def _shares(steps: Sequence[_Step], used: Sequence[int]) -> tuple[float, ...] | None:
    """Each parameter's part of backward: the time from the gradient before it to its own, by medians."""
    whole = [step for step in steps if set(used) <= set(step.arrivals)]
    if not whole:
        return None
    took: dict[int, list[float]] = {index: [] for index in used}
    for step in whole:
        last_s = step.backward_s or 0.0
        for index, at_s in sorted(step.arrivals.items(), key=lambda item: item[1]):
            if index in took:
                took[index].append(max(at_s - last_s, 0.0))
                last_s = at_s
    shares = [median(took[index]) for index in used]
    return tuple(shares) if sum(shares) > 0 else None


def _low_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # kernels are still under way when Python goes on
    return time.perf_counter()
