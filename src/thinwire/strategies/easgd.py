"""EASGD: every worker is pulled towards a centre, and pulls it; nobody waits for anybody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import check
from thinwire.strategies.local.centre import CentreState, CentreStrategy
from thinwire.strategies.settings import check_types


@dataclass(frozen=True, kw_only=True, slots=True)
class EASGD(CentreStrategy):
    """Elastic averaging, asynchronous: every `interval` steps, x -= a (x - c) here and c += a (x - c) there.

    The centre is dealt out over the workers, each of which answers for its part. With momentum in the
    user's optimizer this is EAMSGD.

    Reference: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015, arXiv:1412.6651.
    """

    interval: int = 8
    """Steps between two pulls."""
    pull: float | None = None
    """How far a worker and the centre move towards each other; None: 0.9 / P."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self.interval >= 1, "EASGD.interval", "1 or more steps", self.interval)
        check(self.pull is None or 0 < self.pull < 1, "EASGD.pull", "None, or between 0 and 1", self.pull)

    def _pull(self, world_size: int) -> float:
        return 0.9 / world_size if self.pull is None else self.pull

    def question(self, now: Tensor, index: int, state: CentreState) -> Tensor:
        return now

    def answer(self, question: Tensor, centre: Tensor, world_size: int) -> Tensor:
        before = centre.clone()
        centre.lerp_(question, self._pull(world_size))
        return before

    def move(self, now: Tensor, answer: Tensor, index: int, state: CentreState, world_size: int) -> Tensor:
        return (answer - now).mul_(self._pull(world_size))

    def centre_after(self, question: Tensor, answer: Tensor, world_size: int) -> Tensor:
        return answer.lerp(question, self._pull(world_size))
