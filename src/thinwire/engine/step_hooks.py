"""Notices the steps of a link's optimizers, and trainings that make none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_ENOUGH_CHANGES = 2
"""Changes between two backward passes, one after another: one may be a checkpoint that was loaded."""


class StepHooks:
    """Calls `check` when a step is asked for, `before` when its gradients are there, and `after` it.

    Several optimizers make one step together: it is over when all of them have stepped, or when one of them
    steps again (a GradScaler leaves steps out).
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        check: Callable[[tuple[Any, ...], dict[str, Any]], None],
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._check, self._before, self._after = check, before, after
        self._count = len(optimizers)
        self._stepped: set[int] = set()
        self.handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._begins))
            self.handles.append(optimizer.register_step_post_hook(self._ended))

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if id(optimizer) in self._stepped:
            self._end()
        self._check(args, kwargs)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before()
            return None
        # Forward and backward run inside the step, and exchanges hide behind them.
        evaluate = partial(self._evaluate, closure)
        return (
            ((args[0], evaluate, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": evaluate})
        )

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._before()
        return loss

    def _ended(self, optimizer: Optimizer, *_: object) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == self._count:
            self._end()

    def _end(self) -> None:
        self._stepped.clear()
        self._after()


class IdleWatch:
    """Warns if a model is trained and the optimizer that was attached never steps: nothing would be mixed.

    It looks at the smallest parameter of that optimizer when a gradient for it arrives, until the first step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], strategy: object) -> None:
        self._strategy = strategy
        held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        smallest = min((p for p in held if p.requires_grad), key=Tensor.numel, default=None)
        self._seen: Tensor | None = None
        self._changes = 0
        self._handle = None if smallest is None else smallest.register_post_accumulate_grad_hook(self._look)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _look(self, parameter: Tensor) -> None:
        now = parameter.detach().clone()
        same = self._seen is None or (now.shape == self._seen.shape and bool((now == self._seen).all()))
        self._changes = 0 if same else self._changes + 1
        self._seen = now
        if self._changes >= _ENOUGH_CHANGES:
            self.stop()
            warnings.warn(
                f"the model changes and the attached optimizer does not step, so {self._strategy!r} sends "
                "nothing: attach with the optimizer whose step() the training loop calls",
                stacklevel=2,
            )
