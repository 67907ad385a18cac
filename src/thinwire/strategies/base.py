"""The strategy protocol: frozen settings, a state that the engine can save, and two seams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

Overlap = Literal["forward", "backward", "none"]
Seam = Literal["reduce", "mix", "serve", "settle", "recover"]
OnResize = Literal["sum", "mean", "same", "reset"]
"""Rule for a state when the number of workers changes: its sum over workers is kept, all get its mean,
it is the same on all anyway, or it begins anew."""
Part = Literal["all", "large"]

ON_RESIZE = "on_resize"
SAME: dict[str, OnResize] = {ON_RESIZE: "same"}
"""Metadata of a state's field that outlives another number of workers: `field(metadata=SAME)`."""
OWN = {ON_RESIZE: "own"}
"""Metadata of a state's field that a worker takes along when an elastic world changes, for `recover`."""


class Values(Protocol):
    """One number for each number of a bucket's parameters, flat."""

    num_parameters: int
    """Elements in `read`, `write_` and `add_`."""

    def read(self, out: Tensor | None = None) -> Tensor:
        """A flat copy."""

    def read_span(self, start: int, stop: int) -> Tensor:
        """A copy of the numbers from `start` up to `stop`."""

    def write_(self, data: Tensor) -> None:
        """Overwrite all of them; like all writing, in the training thread only."""

    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        """values += scale * data."""

    def add_span_(self, start: int, data: Tensor, scale: float = 1.0) -> None:
        """The same for those from `start` on, as many as `data` has."""

    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        """values += weight * (data - values); a weight for each, or one for all."""


class Gradients(Protocol):
    """Gradients that travel together, flat, of one dtype on one device."""

    gradient: Tensor
    """The gradients, flat; a scratch tensor that belongs to `reduce` while it runs."""
    exact_from: int
    """Where the part of `gradient` begins that must arrive exact: small tensors, bookkeeping."""

    @property
    def index(self) -> int:
        """Its place in the fixed order in which buckets go out."""

    @property
    def step(self) -> int:
        """The optimizer step under way, counted from 1; the same on all workers."""


class Bucket(Gradients, Values, Protocol):
    """Some of the model as a strategy sees it: parameters, their gradients, and state of its own."""

    @property
    def optimizer_state(self) -> Mapping[str, Values]:
        """The optimizer's averages of these parameters' gradients (momentum, Adam's moments) by name; empty
        for an optimizer that keeps none."""

    @property
    def rate(self) -> float | None:
        """The learning rate that these gradients will be applied with; None where nobody knows."""

    @property
    def normalised(self) -> bool:
        """Whether the optimizer's steps are as long for larger gradients, as Adam's are."""

    @property
    def samples(self) -> float:
        """How much this worker's step under way counts: what `link.weight` was told, 1 if nothing."""

    def is_finite(self) -> bool:
        """Whether the sum of its parameters is a finite number; no copy is made."""

    def name_at(self, place: int) -> str:
        """The name of the parameter that a number in `gradient` belongs to, for messages."""

    def zeros(
        self, name: str, *, on_resize: OnResize, part: Part = "all", of_parameters: bool = False
    ) -> Tensor:
        """A flat tensor of state that follows its parameters into checkpoints, other buckets and other
        worlds.

        `part`: for all parameters, or the large ones only (`exact_from` numbers). In float32 at least.
        `of_parameters`: it will hold values of parameters (not of gradients), so what changes the values of
        all parameters at once, as the removal of neurons does, must change it too.
        """

    def keep(self, name: str, data: Tensor, *, on_resize: OnResize, of_parameters: bool = False) -> Tensor:
        """The same with this content, such as a copy of the parameters; returns `data`."""


class Strategy(Protocol):
    """A communication algorithm: what is sent, to whom, when, and how it is folded in.

    Implementations are frozen, keyword-only dataclasses: their fields are their settings. All that moves is
    in the state made by `init`: tensors by parameter (`bucket.zeros`, `bucket.keep`) and a dataclass of plain
    values.
    """

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def overlap(self) -> Overlap:
        """The compute that sending hides behind: backward and the next forward, backward, or nothing."""
        return "backward"

    @property
    def replicas_agree(self) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return False

    @property
    def period(self) -> int:
        """Steps after which its pattern of messages repeats: whoever measures it measures whole periods."""
        return 1

    @property
    def adapts_in(self) -> int:
        """Steps after which it has adapted to wire and compute: whoever measures it waits so long."""
        return 0

    @property
    def num_buckets(self) -> int:
        """Default number of buckets."""
        return 24

    def uses(self, seam: Seam) -> bool:
        """Whether a seam that it has its own version of is used with these settings."""
        return True

    def rate_scale(self, state: Any, world_size: int, normalised: bool) -> float:
        """The factor on an optimizer's learning rate in every step, so that the rate means what it means
        with exact SGD; users and schedulers never see it. `normalised`: its steps do not grow with the
        gradient."""
        return 1.0

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Any:
        """Make the state of one worker."""
        return

    async def reduce(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        """Reduce gradients. When it ends, `bucket.gradient` is final: a mean over workers, or its estimate.

        Goes on beside training after its first wait; waited for when backward ends.
        """
        return

    async def mix(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        """Mix parameters; started for every bucket after every optimizer step.

        Stays in the training thread, which waits for its end, unless it goes `in_background`.
        """
        return

    async def serve(self, state: Any, wire: Wire) -> None:
        """Answer others beside training, in a loop over `wire.listen`; most strategies have none."""
        return

    async def settle(self, buckets: Sequence[Bucket], state: Any, wire: Wire) -> None:
        """Clear the wire: training pauses, for a checkpoint, an evaluation or for good. Started on
        all workers after the same step, when every `mix` has come back; the next step goes on as before."""
        return

    async def recover(self, buckets: Sequence[Bucket], state: Any, wire: Wire) -> None:
        """In an elastic world, when the workers have changed: come to what all have in common, where that is
        not simply a leaf with on_resize="same". Whoever joins has the leaves of the furthest worker."""
        return

    def advice(self, num_steps: int | None, world_size: int) -> str:
        """A warning for somebody who trains this many steps (None: nobody knows yet) on so many workers with
        these settings; mostly none."""
        return ""

    def instruments(self, state: Any) -> Mapping[str, float]:
        """Measurements of the strategy by name; the same names on all workers, at any time."""
        return {}


def overrides(strategy: Strategy, seam: Seam) -> bool:
    """Whether the strategy has its own version of a seam, and uses it: others are not called."""
    own = getattr(type(strategy), seam) is not getattr(Strategy, seam)
    return own and strategy.uses(seam)


def local_norm(max_norm: float, world_size: int) -> float:
    """The norm each worker clips its own gradient to, where the mean over all workers is to have `max_norm`.

    The noise of P gradients is independent, so their mean has a norm that is up to sqrt(P) times smaller.
    """
    return max_norm * math.sqrt(world_size)


LONGEST_STEP = 2.0
"""Largest factor on steps: too little is known of longer ones (docs/learning_rate.md)."""
OFTEN = 8
"""Steps between two averages up to which the mean of workers' steps is all there is to it."""


def step_scale(world_size: int, normalised: bool, interval: float) -> float:
    """The factor on steps of workers that makes their mean as long as the step of the mean gradient would be,
    where parameters are averaged after every `interval` steps.

    Each worker's gradient has the noise of a smaller batch. A normalised step is as long as any other, most
    of it noise then, which the mean over P workers takes away, and up to sqrt(P) of the length with it. The
    longer workers are alone, the more a longer step takes them apart instead.

    >>> [round(step_scale(world_size, True, 1), 2) for world_size in (1, 2, 4, 16)]
    [1.0, 1.41, 2.0, 2.0]
    >>> [round(step_scale(4, True, interval), 2) for interval in (8, 32, 128)]
    [2.0, 1.25, 1.06]
    """
    if not normalised:
        return 1.0
    return 1 + (min(math.sqrt(world_size), LONGEST_STEP) - 1) * min(1.0, OFTEN / interval)


def norm_to_clip(strategy: Strategy, max_norm: float, world_size: int) -> float:
    """The norm a training loop has to clip gradients to: reduced ones are the mean already, and those that a
    strategy has clipped itself (`clip_norm`) must not be clipped again."""
    if getattr(strategy, "clip_norm", None) is not None:
        return math.inf
    local = overrides(strategy, "mix") and not overrides(strategy, "reduce")
    return local_norm(max_norm, world_size) if local else max_norm
