"""Apoptosis: the settings, given to `attach`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from thinwire.errors import SettingError, check, check_count, check_one_of

if TYPE_CHECKING:
    from thinwire.apoptosis.shrinking import Shrinking
    from thinwire.engine.link import Link

Mode = Literal["conservative", "adaptive", "aggressive"]
BUDGETS: dict[Mode, float] = {"conservative": 0.005, "adaptive": 0.04, "aggressive": 0.08}
"""How much a layer's output may change in one event, by mode."""


EARLY = 4
"""Times `every`: the first event of a training whose length is not known."""
LATE = 8
"""One in so many steps comes before the first event, where their number is known."""
KEYS = ("every", "start", "stop", "min_width", "multiple", "budget", "lasso")
"""Settings that a command line takes beside the mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apoptosis:
    """Removes neurons that the others make up for, on all workers at once, while a network trains.

    The idea is that of Siegel, Daily and Vishnu (2016, arXiv:1610.00790); thresholds and schedule are ours.

    >>> import torch, thinwire as tw
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> apoptosis = tw.Apoptosis(mode="aggressive", every=5)
    >>> with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=apoptosis) as link:
    ...     for step in range(6):
    ...         x = torch.randn(100, 2)
    ...         (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
    ...         optimizer.step()
    >>> model[0].out_features < 64
    True
    """

    mode: Mode = "adaptive"
    """ "conservative": only neurons go that hardly change the output. "aggressive": as many as the larger
    budget allows, at every event. "adaptive": more and more while the loss keeps falling, which
    `link.observe(loss)` tells; where it rises, the last event is undone and the next ones remove less."""
    every: int = 200
    """Optimizer steps between two events."""
    start: int | None = None
    """Steps before the first event: a young network needs neurons that it does not use yet. None: an eighth
    of the `num_steps` that `attach` is told, or four times `every`."""
    stop: int | None = None
    """Steps after which nothing goes any more: what is left needs some to settle. None: three quarters of
    the `num_steps` that `attach` is told, else never."""
    min_width: int = 4
    """Neurons that every layer keeps."""
    multiple: int | None = None
    """Layers are cut to widths that are a multiple of this; None: 8 on a GPU, whose kernels are slower at
    other widths, else 1."""
    budget: float | None = None
    """How much one event may change a layer's output on recent data (root mean square, relative to how much
    the output varies); None: 0.005, 0.04 or 0.08 by mode."""
    lasso: float = 0.0
    """Strength of a group lasso that makes neurons vanish, for networks with none to spare (0: none). Every
    step shrinks the incoming weights of every neuron by learning rate * lasso, in their norm."""

    def __post_init__(self) -> None:
        check_one_of("mode", self.mode, get_args(Mode))
        check_count("every", self.every, "steps")
        if self.start is not None:
            check_count("start", self.start, "steps")
        if self.stop is not None:
            check_count("stop", self.stop, "steps")
        check_count("min_width", self.min_width, "neurons")
        if self.multiple is not None:
            check_count("multiple", self.multiple, "neurons")
        if self.budget is not None:
            check(0 < self.budget < 1, "budget", "between 0 and 1", self.budget)
        check(0 <= self.lasso < 1e6, "lasso", "0 or more", self.lasso)

    @property
    def first(self) -> int:
        """The step of the first event."""
        return EARLY * self.every if self.start is None else self.start

    @property
    def limit(self) -> float:
        """The budget in force."""
        return BUDGETS[self.mode] if self.budget is None else self.budget

    def within(self, num_steps: int | None) -> Apoptosis:
        """The same for a training of so many steps, if that is known."""
        if num_steps is None:
            return self
        start = max(1, num_steps // LATE // self.every) * self.every
        stop = max(1, num_steps * 3 // 4)
        return replace(
            self,
            start=start if self.start is None else self.start,
            stop=stop if self.stop is None else self.stop,
        )

    def is_due(self, steps: int) -> bool:
        """Whether something is decided after so many steps."""
        return self.steps_to_next(steps) == 0

    def steps_to_next(self, steps: int) -> float:
        """How many more are made before something is decided: 0 now, infinity never again."""
        ahead = max(self.first - steps, -(steps - self.first) % self.every)
        return ahead if self.stop is None or steps + ahead <= self.stop else math.inf

    def join(
        self, link: Link, model: nn.Module, optimizers: Sequence[Optimizer], *, num_steps: int | None
    ) -> Shrinking:
        """Called by `attach`."""
        from thinwire.apoptosis.shrinking import Shrinking

        return Shrinking(self.within(num_steps), link, model, optimizers)


def parse(text: str) -> Apoptosis:
    """Settings as on a command line: `MODE:KEY=VALUE:KEY=VALUE`, such as `adaptive:every=100`."""
    mode, *pairs = text.split(":")
    values: dict[str, float | int] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        check_one_of("apoptosis setting", key, KEYS)
        try:
            values[key] = float(value) if key in ("budget", "lasso") else int(value)
        except ValueError as error:
            raise SettingError(f"apoptosis setting {key} must be a number, got {value!r}") from error
    return Apoptosis(mode=mode, **values)  # type: ignore[arg-type]  # mode is checked there
