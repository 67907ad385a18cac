"""Downpour: workers push what they changed to a centre, and go on from it; nobody waits for anybody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import check
from thinwire.strategies.local.centre import CentreState, CentreStrategy
from thinwire.strategies.settings import check_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Downpour(CentreStrategy):
    """Asynchronous SGD: every `interval` steps a worker adds its changes to the centre, and takes it over.

    The centre is dealt out over the workers, each of which answers for its part. Steps made while the
    answer is on its way stay, and are pushed the next time: every change is applied once.

    Reference: Dean et al., Large Scale Distributed Deep Networks, 2012.
    """

    interval: int = 1
    """Steps between two pushes."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self.interval >= 1, "Downpour.interval", "1 or more steps", self.interval)

    def question(self, now: Tensor, index: int, state: CentreState) -> Tensor:
        return now - state.fetched[index]

    def answer(self, question: Tensor, centre: Tensor, world_size: int) -> Tensor:
        return centre.add_(question).clone()

    def move(self, now: Tensor, answer: Tensor, index: int, state: CentreState, world_size: int) -> Tensor:
        state.fetched[index].copy_(answer)
        return answer - now

    def centre_after(self, question: Tensor, answer: Tensor, world_size: int) -> Tensor:
        return answer

    def counted(self, question: Tensor, index: int, state: CentreState) -> None:
        state.fetched[index].add_(question)
