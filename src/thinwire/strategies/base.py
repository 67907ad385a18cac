"""What a strategy is: settings that are frozen, a state that is plain, and two seams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from thinwire.traffic import Cluster, Round, Sizes
from thinwire.wire.base import Wire

if TYPE_CHECKING:
    from torch import Tensor

Overlap = Literal["forward", "backward", "none"]
Seam = Literal["reduce", "mix", "serve", "settle"]
_SEAMS: tuple[Seam, ...] = get_args(Seam)


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

    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        """parameters += weight * (data - parameters); a weight for each, or one for all."""
        ...

    @property
    def companions(self) -> Mapping[str, Parameters]:
        """What the optimizer keeps of these parameters' gradients (momentum, Adam's moments) by name, each
        as flat as the parameters are; empty for an optimizer that keeps none."""
        ...


class Bucket(Gradients, Parameters, Protocol):
    """Some of the model as a strategy sees it: parameters and their gradients."""

    def name_at(self, place: int) -> str:
        """The name of the parameter that a number in `gradient` belongs to, for messages."""
        ...

    @property
    def rate(self) -> float | None:
        """The learning rate that these gradients will be applied with; None where nobody knows."""
        ...


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

    @property
    def seams(self) -> frozenset[Seam]:
        """Which of the coroutines below it has, with its settings: the others are not called."""
        return frozenset(seam for seam in _SEAMS if getattr(type(self), seam) is not getattr(Strategy, seam))

    @property
    def adapts_in(self) -> int:
        """Steps after which it has found out what suits wire and compute; 0 if it does the same on any."""
        return 0

    @property
    def conserved(self) -> tuple[str, ...]:
        """Fields of the state that differ by worker and whose sum over workers may not change, such as
        residuals: what was not sent yet must not be lost when the number of workers changes."""
        return ()

    @property
    def clips(self) -> bool:
        """Whether it clips each worker's own gradients itself, so that the training loop has not to."""
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

    async def settle(self, buckets: Sequence[Parameters], state: Any, wire: Wire) -> None:
        """Have nothing on the wire: training pauses, for a checkpoint, an evaluation or for good. Started on
        all workers after the same step, when every `mix` has landed; the next step goes on as before."""
        return

    def rounds(self, sizes: Sizes, cluster: Cluster, step: int = 0) -> Iterable[Round]:
        """The wire operations of one worker in its step number `step`, from 0, from sizes alone."""
        return ()

    def caution(self, num_steps: int) -> str:
        """What somebody should know who trains for so many steps with these settings; mostly nothing."""
        return ""

    def instruments(self, state: Any) -> Mapping[str, float]:
        """What it can tell of itself, by name; the same names on all workers, at any time."""
        return {}

    def resize(self, saved: Sequence[Any], rank: int, world_size: int) -> Any:
        """This worker's state, made of those that another number of workers saved, in order of rank.

        Of `conserved` fields, those of the workers `rank`, `rank + world_size`, ... are added up.
        """
        return _resize(saved, self.conserved, rank, world_size, add=False)


def _resize(
    saved: Sequence[Any], conserved: tuple[str, ...], rank: int, world_size: int, *, add: bool
) -> Any:
    own = saved[rank if rank < len(saved) else 0]
    if isinstance(own, dict):
        return {
            key: _resize([s[key] for s in saved], conserved, rank, world_size, add=add or key in conserved)
            for key in own
        }
    if isinstance(own, list):
        entries = zip(*saved, strict=True)
        return [_resize(entry, conserved, rank, world_size, add=add) for entry in entries]
    if add and hasattr(own, "new_zeros"):
        return sum(saved[rank::world_size], start=own.new_zeros(own.shape))
    return own


def overrides(strategy: Strategy, seam: Seam) -> bool:
    """Whether the strategy has its own version of a seam."""
    return seam in strategy.seams


def own_norm(max_norm: float, world_size: int) -> float:
    """What each worker clips its own gradient to, where the mean over all workers is to have this norm.

    The noise of P gradients is independent, so their mean has a norm that is up to sqrt(P) times smaller.
    """
    return max_norm * math.sqrt(world_size)


def norm_to_clip(strategy: Strategy, max_norm: float, world_size: int) -> float:
    """What a training loop has to clip gradients to: those a strategy averages are the mean already, and
    those it has clipped need it no more."""
    if strategy.clips:
        return math.inf
    own = overrides(strategy, "mix") and not overrides(strategy, "reduce")
    return own_norm(max_norm, world_size) if own else max_norm
