"""Some parameters as one flat tensor: how gradients get in and out of it, and a strategy's state beside them.

A bucket is scratch: the user's parameters and gradients are copied in and out and never moved. Of a DTensor
it holds the local part. `flat_gradient.py` has the layout of the tensor that travels.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.engine.flat_gradient import FlatGradient
from thinwire.engine.leaves import Leaf
from thinwire.engine.span import Span, views
from thinwire.errors import UsageError
from thinwire.strategies.base import OnResize, Part, Values


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this worker holds; a plain tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


@dataclass(slots=True)
class TrainingContext:
    """What all buckets of a worker are told."""

    step: int = 1
    """The optimizer step under way, counted from 1."""
    samples: float | None = None
    """How much this worker's gradients of that step count; None: nobody said."""
    thread: int | None = None
    """The training thread, the only one that may write parameters; None where nobody checks."""

    def check_thread(self) -> None:
        if self.thread is not None and self.thread != threading.get_ident():
            raise UsageError(
                "a strategy wrote parameters outside the training thread",
                hint="`await training_thread()` before bucket.write_, add_ or lerp_",
            )


class ParameterBucket:
    """Some parameters of the model, and the flat scratch tensor their gradients travel in."""

    def __init__(
        self,
        place: int,
        names: Sequence[str],
        parameters: Sequence[Parameter],
        small: int,
        context: TrainingContext,
    ) -> None:
        """`small`: parameters with at most this many numbers arrive exact."""
        self.order = sorted(range(len(parameters)), key=lambda i: local(parameters[i]).numel() <= small)
        """Which of the parameters given each of the bucket's is: small ones last."""
        self.place = place
        """In the order in which all buckets of the model go out."""
        self.index = place
        """In the order of the buckets of its group."""
        self.names = [names[i] for i in self.order]
        self.parameters: list[Tensor] = [parameters[i] for i in self.order]
        self._locals = [local(p) for p in self.parameters]
        sizes = [p.numel() for p in self._locals]
        self.num_parameters = sum(sizes)
        self.exact_from = sum(size for size in sizes if size > small)
        self._num_large = sum(size > small for size in sizes)
        self.flat = FlatGradient([p.shape for p in self._locals], like=self._locals[0])
        self.gradient = self.flat.data
        self.optimizer_state: Mapping[str, Values] = {}
        self.read_rate: Callable[[], float | None] = lambda: None
        self.normalised = False
        self.leaves: dict[str, Leaf] = {}
        self._context = context
        self.not_finite = ""
        """Which gradient of this worker was not finite when it was last sent; mostly none."""
        self._plain = all(local(p) is p for p in self.parameters)

    def _split(self, flat: Tensor) -> list[Tensor]:
        return views(flat, [p.shape for p in self._locals])

    def _span(self, start: int, stop: int) -> Span:
        return Span(self._locals, [p.numel() for p in self._locals], start, stop)

    @property
    def step(self) -> int:
        return self._context.step

    @property
    def rate(self) -> float | None:
        return self.read_rate()

    @property
    def samples(self) -> float:
        return 1.0 if self._context.samples is None else self._context.samples

    def name_at(self, place: int) -> str:
        ends = accumulate(p.numel() for p in self._locals)
        return next(name for name, end in zip(self.names, ends, strict=True) if place < end)

    def check_kind(self) -> None:
        """Raise UsageError if a parameter has another dtype, device or shape than it had at first."""
        self._locals = [local(p) for p in self.parameters]  # of a DTensor, it may be another one
        like = self.gradient
        for name, now, view in zip(self.names, self._locals, self.flat.views, strict=True):
            if (now.dtype, now.device, now.shape) != (like.dtype, like.device, view.shape):
                raise UsageError(
                    f"{name} has become {tuple(now.shape)} {now.dtype} on {now.device}; it was "
                    f"{tuple(view.shape)} {like.dtype} on {like.device} at attach",
                    hint="change the model before attach; or link.detach(), and attach again",
                )

    # -- state of a strategy ------------------------------------------------------------------------

    def zeros(
        self, name: str, *, on_resize: OnResize, part: Part = "all", of_parameters: bool = False
    ) -> Tensor:
        count = self.num_parameters if part == "all" else self.exact_from
        data = self.gradient.new_zeros(count)
        # half precision is too little to add up in
        data = data.float() if data.element_size() < 4 else data
        return self.keep(name, data, on_resize=on_resize, of_parameters=of_parameters)

    def keep(self, name: str, data: Tensor, *, on_resize: OnResize, of_parameters: bool = False) -> Tensor:
        count = len(self.names) if data.numel() == self.num_parameters else self._num_large
        shapes = [p.shape for p in self._locals[:count]]
        self.leaves[name] = Leaf(data, on_resize, self.names[:count], shapes, of_parameters)
        return data

    def remember_(self) -> None:
        for leaf in self.leaves.values():
            leaf.remember_()

    def undo_(self) -> None:
        """A pass was not used: go back to the state before it."""
        for leaf in self.leaves.values():
            leaf.undo_()

    def commit_(self) -> None:
        """A step has used the last pass: there is nothing to go back to."""
        for leaf in self.leaves.values():
            leaf.changed = False

    # -- gradients --------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_(self, weight: float) -> list[Tensor | None]:
        """Fill `gradient` from the parameters' own gradients, which are returned; those without one travel as
        zeros."""
        own = [p.grad for p in self.parameters]
        if self.gradient.is_meta:
            return own  # sizes alone, without numbers
        self.flat.refused = False
        grads, slots = self._present(own)
        try:
            _copy_(slots, grads)
        except RuntimeError:
            self._check_layout(own)
            raise
        absent = len(grads) < len(own)
        unused = [place for place, grad in enumerate(own) if grad is None] if absent else []
        self._name_not_finite(self.flat.complete_(weight, unused))
        return own

    def _name_not_finite(self, place: int | None) -> None:
        self.not_finite = "" if place is None else self.name_at(place)

    def _present(self, own: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that are there, by their local part, and where they lie in the bucket."""
        grads, slots = [grad for grad in own if grad is not None], self.flat.views
        if len(grads) < len(own):
            slots = [view for grad, view in zip(own, slots, strict=True) if grad is not None]
        return grads if self._plain else [local(grad) for grad in grads], slots

    def _check_layout(self, own: Sequence[Tensor | None]) -> None:
        for name, grad in zip(self.names, own, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of {name} is sparse ({grad.layout}), which thinwire cannot send",
                    hint="make the embedding with sparse=False",
                )

    @torch.no_grad()
    def fill_(self, gradients: Sequence[Tensor]) -> None:
        """Fill `gradient` from tensors that are handed in, in the order of `parameters`; all count."""
        torch._foreach_copy_(self.flat.views, list(gradients))
        self._name_not_finite(self.flat.complete_())

    @torch.no_grad()
    def empty_into_(self, gradients: Sequence[Tensor]) -> None:
        """Overwrite tensors that are handed in with the reduced gradients."""
        self.flat.divide_()
        torch._foreach_copy_(list(gradients), self.flat.views)

    @torch.no_grad()
    def refuse_(self, gradients: Iterable[Tensor]) -> None:
        """Have no step made with these gradients, since some worker's are not finite."""
        self.flat.refused = True
        for gradient in gradients:
            local(gradient).fill_(math.nan)

    @torch.no_grad()
    def scatter_(self, own: Sequence[Tensor | None]) -> None:
        """Copy the reduced gradients back into what `gather_` returned; a parameter that no worker used keeps
        having none."""
        if self.gradient.is_meta:
            return
        self.flat.divide_()
        grads, slots = self._present(own)
        _copy_(grads, slots)
        if len(grads) < len(own):
            used_somewhere = self.flat.used_somewhere()
            for parameter, view, used in zip(self.parameters, self.flat.views, used_somewhere, strict=True):
                if parameter.grad is None and used:
                    parameter.grad = as_gradient(parameter, view.clone(memory_format=torch.contiguous_format))

    @torch.no_grad()
    def lend_(self) -> None:
        """Make the reduced gradients the parameters' own as views; none for those no worker used."""
        if self.gradient.is_meta:
            return
        self.flat.divide_()
        used_somewhere = self.flat.used_somewhere()
        try:
            for parameter, view, used in zip(self.parameters, self.flat.views, used_somewhere, strict=True):
                parameter.grad = as_gradient(parameter, view) if used else None
        except RuntimeError:  # torch refuses gradients of another kind than their parameter
            self.check_kind()
            raise

    def plain_views(self) -> list[Tensor | None]:
        """Where the gradient of each parameter lies; None for DTensors, and where there are no numbers."""
        hidden = self.gradient.is_meta
        return [
            None if hidden or local(p) is not p else v
            for p, v in zip(self.parameters, self.flat.views, strict=True)
        ]

    # -- parameters -------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.num_parameters, dtype=self.gradient.dtype, device=self.gradient.device)
        if not out.is_meta:
            torch._foreach_copy_(self._split(out), self._locals)
        return out

    @torch.no_grad()
    def read_span(self, start: int, stop: int) -> Tensor:
        out = self.gradient.new_empty(stop - start)
        if not out.is_meta:
            self._span(start, stop).copy_to_(out)
        return out

    @torch.no_grad()
    def is_finite(self) -> bool:
        if self.gradient.is_meta:
            return True
        return math.isfinite(torch.stack([p.sum() for p in self._locals]).sum())

    @torch.no_grad()
    def write_(self, data: Tensor) -> None:
        self._context.check_thread()
        if not data.is_meta:
            torch._foreach_copy_(self._locals, self._split(data))

    @torch.no_grad()
    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        self._context.check_thread()
        if not data.is_meta:
            torch._foreach_add_(self._locals, self._split(data), alpha=scale)

    @torch.no_grad()
    def add_span_(self, start: int, data: Tensor, scale: float = 1.0) -> None:
        self._context.check_thread()
        if not data.is_meta:
            self._span(start, start + data.numel()).add_(data, scale)

    @torch.no_grad()
    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        self._context.check_thread()
        if not data.is_meta:
            weights = self._split(weight) if isinstance(weight, Tensor) else weight
            torch._foreach_lerp_(self._locals, self._split(data), weights)


def _copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch refuses empty lists
        torch._foreach_copy_(targets, sources)


def as_gradient(parameter: Tensor, part: Tensor) -> Tensor:
    """A gradient with this local part."""
    if local(parameter) is parameter:
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
