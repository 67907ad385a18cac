"""The workload, as the planner sees it: shapes of parameters and seconds of computing; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from thinwire.errors import check, check_count
from thinwire.lab.nets import LONGEST_S, MOST_LAYERS, MOST_PARAMS, Net, Shape, equal_net

FORWARD_SHARE = 1 / 3
"""Forward's part of the computing time; the gradients of data and of weights take one forward each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One worker's step: the trainable parameters in the order of forward, and how long it computes."""

    name: str
    shapes: tuple[Shape, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    """Seconds of the optimizer's step; 0 where they are counted with backward."""
    shares: tuple[float, ...] | None = None
    """Each parameter's part of the computing time; None: its part of all numbers."""
    batch: int | None = None
    """Samples per worker and step; None: not known."""
    num_steps: int | None = None
    """Steps of the whole training with one worker; None: not known."""
    on_processor: bool = False
    """Whether it computes where bytes are sent and received too."""
    normalised: bool = False
    """Whether its optimizer is known to make steps of one size, as AdamW does."""
    recipe: str | None = None
    """The recipe it is from, whose measured accuracy counts most."""

    def __post_init__(self) -> None:
        check(bool(self.shapes), "model", "one with trainable parameters", "none")
        parts = (("forward", self.forward_s), ("backward", self.backward_s), ("optimizer", self.optimizer_s))
        for field, seconds in parts:
            check(0 <= seconds <= LONGEST_S, field, f"0 to {LONGEST_S:g} seconds", seconds)
        check(self.compute_s > 0, "compute", "above 0 seconds", self.compute_s)
        if self.batch is not None:
            check_count("batch", self.batch, "samples")

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def times(self, factor: float) -> Workload:
        """The same model with `factor` times the samples per worker, and the time of forward and backward."""
        batch = None if self.batch is None else max(1, round(self.batch * factor))
        forward_s, backward_s = self.forward_s * factor, self.backward_s * factor
        return replace(self, batch=batch, forward_s=forward_s, backward_s=backward_s)

    def slowed(self, factor: float) -> Workload:
        """The same workload with all times multiplied by `factor`."""
        return replace(self.times(factor), batch=self.batch, optimizer_s=self.optimizer_s * factor)

    def with_batch(self, batch: int) -> Workload:
        """The same model with another batch per worker; forward and backward take time in proportion."""
        check_count("batch", batch, "samples")
        return replace(self, batch=batch) if self.batch is None else self.times(batch / self.batch)

    @staticmethod
    def of_net(net: Net) -> Workload:
        """A net of the emulated accelerator; a layer's share of the time is divided over its tensors."""
        layers = list(zip(net.layers, net.shares(), strict=True))
        return Workload(
            name=net.name,
            shapes=tuple(shape for layer in net.layers for shape in layer.shapes),
            shares=tuple(share / len(layer.shapes) for layer, share in layers for _ in layer.shapes),
            forward_s=net.forward_s,
            backward_s=net.backward_s,
            batch=net.batch if net.batch > 1 else None,
        )

    @staticmethod
    def of_sizes(params: float, layers: int, compute_s: float) -> Workload:
        """Layers of equal size and work.

        >>> Workload.of_sizes(25.6e6, 50, 0.2).num_params
        25600000
        """
        check(0 < params < math.inf, "params", "a positive number of parameters", params)
        check(1 <= layers <= MOST_LAYERS, "layers", f"1 to {MOST_LAYERS:,}", layers)
        check(
            layers <= params <= MOST_PARAMS,
            "params",
            f"at least one per layer, at most {MOST_PARAMS:g}",
            params,
        )
        forward_s = compute_s * FORWARD_SHARE
        seconds = {"forward_s": forward_s, "backward_s": compute_s - forward_s}
        net = equal_net(params=round(params), layers=layers, **seconds)
        return replace(Workload.of_net(net), name=f"{round(params):,} parameters in {layers} layers")
