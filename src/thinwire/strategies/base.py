"""What a strategy is: settings that are frozen, a state that is plain, and two seams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from thinwire.traffic import Cluster, Round, Sizes
from thinwire.wire.base import Wire

if TYPE_CHECKING:
    from torch import Tensor

Overlap = Literal["forward", "backward", "none"]


class Gradients(Protocol):
    """Gradients that travel together, flat, of one dtype on one device."""

    @property
    def index(self) -> int:
        """Its place in the fixed order in which buckets go out."""
        ...

    @property
    def gradient(self) -> Tensor:
        """The gradients, flat; a scratch tensor that belongs to `reduce` while it runs."""
        ...

    @property
    def exact_from(self) -> int:
        """Where the part of `gradient` begins that must arrive exact: small tensors, bookkeeping."""
        ...


class Parameters(Protocol):
    """Parameters that travel together, flat, of one dtype on one device."""

    @property
    def index(self) -> int:
        """Its place in the fixed order in which buckets go out."""
        ...

    @property
    def num_parameters(self) -> int:
        """Elements in `read`, `write_` and `add_`."""
        ...

    def read(self, out: Tensor | None = None) -> Tensor:
        """A flat copy of the parameters."""
        ...

    def write_(self, data: Tensor) -> None:
        """Overwrite the parameters."""
        ...

    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        """parameters += scale * data."""
        ...


class Bucket(Gradients, Parameters, Protocol):
    """Some of the model as a strategy sees it: parameters and their gradients."""


class Strategy(Protocol):
    """What is sent, to whom, when, and how it is folded in.

    Implementations are frozen, keyword-only dataclasses: their fields are their settings. All
    that moves is in the state made by `init`, which is plain tensors and numbers.
    """

    @property
    def overlap(self) -> Overlap:
        """What sending hides behind: backward and the next forward, backward, or nothing."""
        return "backward"

    @property
    def replicas_agree(self) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return False

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Any:
        """The state: buffers and lanes are made here, by all workers."""
        return

    async def reduce(self, bucket: Gradients, state: Any, wire: Wire) -> None:
        """Gradients. When it ends, `bucket.gradient` is final: a mean over workers, or its estimate."""
        return

    async def mix(self, bucket: Parameters, state: Any, wire: Wire) -> None:
        """Parameters; started for every bucket after every optimizer step. Training waits for its
        end, unless it takes off."""
        return

    async def serve(self, state: Any, wire: Wire) -> None:
        """Runs beside training from attach to detach; most strategies have none."""
        return

    def rounds(self, sizes: Sizes, cluster: Cluster) -> Iterable[Round]:
        """The wire operations of one worker in one step, from sizes alone."""
        return ()


def overrides(strategy: Strategy, seam: Literal["reduce", "mix", "serve"]) -> bool:
    """Whether the strategy has its own version of a seam."""
    return getattr(type(strategy), seam) is not getattr(Strategy, seam)
