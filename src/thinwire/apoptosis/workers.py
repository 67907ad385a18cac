"""What apoptosis needs of those who train: a link, or all workers of a simulation at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from thinwire.apoptosis.surgery import Kept
from thinwire.strategies.base import Strategy


class Everyone(Protocol):
    """What workers do together between steps."""

    def sum_(self, data: Tensor) -> None: ...

    def total(self, values: Sequence[float]) -> list[float]: ...

    def gather_objects(self, value: Any) -> list[Any]: ...

    def broadcast_tensors_(self, tensors: Iterable[Tensor], source: int) -> None: ...


class Workers(Protocol):
    """One worker of those who train together, between two steps; the methods are those of `Link`."""

    rank: int
    world_size: int
    strategy: Strategy

    @property
    def steps(self) -> int: ...

    @property
    def everyone(self) -> Everyone: ...

    def synchronize(self) -> None: ...

    def average_(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def reshape(
        self, kept: Kept, *, change: Callable[[], None], move: Callable[[dict[str, Tensor]], None]
    ) -> None: ...

    def restore(self, saved: dict[str, Any], change: Callable[[], None]) -> None: ...
