"""A rival for the tests of the benchmark that fails as soon as it is joined."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals import Joined
from thinwire.bench.systems import System


@dataclass(frozen=True)
class Failing:
    name: str = "failing"
    period: int = 1

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        raise ValueError("on purpose")


def all_rivals() -> dict[str, System]:
    return {"failing": Failing()}
