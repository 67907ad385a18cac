"""Rivals for the tests of the benchmark: one that runs, and one that does not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals import Joined
from benchmarks.rivals.ddp import Ddp
from thinwire.bench.systems import System


@dataclass(frozen=True)
class Absent:
    """Never installed anywhere."""

    name: str = "absent"
    period: int = 1

    def available(self) -> str | None:
        return "not installed: pip install absent"

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        raise AssertionError("an absent rival is not joined")


def all_rivals() -> dict[str, System]:
    rivals: list[System] = [Ddp(), Absent()]
    return {rival.name: rival for rival in rivals}
