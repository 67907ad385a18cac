"""What the training loop asks of whatever joins the workers: a link, or another system's stand-in for one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.attach import attach
from thinwire.recipes.config import RunConfig
from thinwire.recipes.meter import Stats
from thinwire.strategies import registry as strategies
from thinwire.strategies.base import overrides

_log = logging.getLogger("thinwire")


class Peers(Protocol):
    """The other workers, as the loop needs them; a `Link` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def stats(self) -> Stats: ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """A few numbers, summed over all workers; called by all of them."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Cut the gradients down to this norm."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """The mean model in here, the worker's own again after it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """What to train with, once the workers are joined."""

    model: nn.Module
    """Some systems wrap the model,"""
    optimizer: Optimizer
    """some the optimizer."""
    peers: Peers
    replicas_agree: bool
    """Whether all workers hold the same model; if not, the mean is what a user would keep."""


Join = Callable[[nn.Module, Optimizer], AbstractContextManager[Joined]]


def caution_of(config: RunConfig, num_steps: int, *, tell: bool) -> str:
    """What the strategy that `config` names has to say of a training with so many steps; a rival says
    nothing."""
    if config.workers == 1 or config.strategy not in strategies.names():
        return ""
    caution = strategies.build(config.strategy, config.settings).caution(num_steps)
    if caution and tell:
        _log.warning(caution)
    return caution


def join_by(config: RunConfig) -> Join:
    """Joins workers by the strategy that `config` names."""

    @contextmanager
    def join(model: nn.Module, optimizer: Optimizer) -> Iterator[Joined]:
        strategy = strategies.build(config.strategy, config.settings)
        talks = overrides(strategy, "reduce") or overrides(strategy, "mix")
        agree = strategy.replicas_agree or not talks
        with attach(model, optimizer, strategy) as link:
            yield Joined(model=model, optimizer=optimizer, peers=link, replicas_agree=agree)

    return join
