"""Some parameters as one flat tensor: how gradients get in and out of it, and a strategy's state beside them.

A bucket is scratch: the user's parameters and gradients are copied in and out and never moved. Of a DTensor
it holds the local part. Layout of `gradient`: large tensors, then small ones, then how much this worker's
gradient counts, then a flag that says whether that is something else than 1 (infinite: some gradient is not
finite, and none is sent), then one flag per parameter that says whether this step used it. So everything that
must arrive exact is one piece at the end, and what one worker decides all of them see.
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

from thinwire.engine.leaves import Leaf
from thinwire.engine.span import Span
from thinwire.errors import UsageError
from thinwire.strategies.base import OnResize, Part, Values

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        example = self._locals[0]
        self.gradient = torch.zeros(
            self.num_parameters + 2 + len(sizes), dtype=example.dtype, device=example.device
        )
        self.optimizer_state: Mapping[str, Values] = {}
        self.read_rate: Callable[[], float | None] = lambda: None
        self.normalised = False
        self.leaves: dict[str, Leaf] = {}
        self._context = context
        self._gradients, self._tail = self.gradient.split([self.num_parameters, 2 + len(sizes)])
        complex_ = self.gradient.is_complex()
        self._reals = (torch.view_as_real(self._gradients) if complex_ else self._gradients).view(-1)
        self._weight, self._uneven, self._used = self._tail.split([1, 1, len(sizes)])
        self._usual_tail = torch.ones_like(self._tail)
        self._usual_tail[1] = 0.0
        # Asking torch for one number takes longer than all the rest of a small bucket's way back.
        bits = _BITS.get(example.element_size()) if self.gradient.is_cpu else None
        self._uneven_bits = None if bits is None else self._uneven.view(bits).numpy()
        self._sum = torch.zeros((), dtype=torch.promote_types(self._reals.dtype, torch.float32))
        self._sum_number = self._sum.numpy()
        self._views = self._split(self._gradients)
        self.not_finite = ""
        """Which gradient of this worker was not finite when it was last sent; mostly none."""
        self.refused: bool | Tensor = False
        """Whether the gradients of some worker were not, so that no step may be made with them."""
        self._plain = all(local(p) is p for p in self.parameters)

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._locals])
        return [part.view(p.shape) for part, p in zip(parts, self._locals, strict=True)]

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
        for name, now, view in zip(self.names, self._locals, self._views, strict=True):
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

    def keep_(self) -> None:
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
        self.refused = False
        grads, views = self._present(own)
        try:
            _copy_(views, grads)
        except RuntimeError:
            self._check_layout(own)
            raise
        self._tail.copy_(self._usual_tail)
        if len(grads) < len(own):
            for place in [place for place, grad in enumerate(own) if grad is None]:
                self._views[place].zero_()
                self._used[place] = 0.0
        if weight != 1.0:
            self._gradients.mul_(weight)
            self._weight.fill_(weight)
            self._uneven.fill_(1.0)
        self._hold_back_()
        return own

    def _present(self, own: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that are there, by their local part, and where they lie in the bucket."""
        grads, views = [grad for grad in own if grad is not None], self._views
        if len(grads) < len(own):
            views = [view for grad, view in zip(own, views, strict=True) if grad is not None]
        return grads if self._plain else [local(grad) for grad in grads], views

    def _check_layout(self, own: Sequence[Tensor | None]) -> None:
        for name, grad in zip(self.names, own, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of {name} is sparse ({grad.layout}), which thinwire cannot send",
                    hint="make the embedding with sparse=False",
                )

    def _hold_back_(self) -> None:
        """Send zeros and a flag instead of gradients that are not finite."""
        self.not_finite = ""
        if self.gradient.is_meta:
            return
        if not self.gradient.is_cpu:  # where asking would wait for the device
            fine = self._gradients.isfinite().all()
            self._gradients.mul_(fine).nan_to_num_(0.0)
            self._uneven.copy_(torch.where(fine, self._uneven, math.inf))
            return
        torch.sum(self._reals, dim=0, dtype=self._sum.dtype, out=self._sum)
        if not math.isfinite(self._sum_number):
            wrong = self._gradients.isfinite().logical_not_().nonzero()
            if wrong.numel():  # and not just a sum that is too large
                self.not_finite = self.name_at(int(wrong[0]))
                self._gradients.zero_()
                self._uneven.fill_(math.inf)

    @torch.no_grad()
    def fill_(self, gradients: Sequence[Tensor]) -> None:
        """Fill `gradient` from tensors that are handed in, in the order of `parameters`; all count."""
        torch._foreach_copy_(self._views, list(gradients))
        self._tail.copy_(self._usual_tail)
        self._hold_back_()

    @torch.no_grad()
    def empty_into_(self, gradients: Sequence[Tensor]) -> None:
        """Overwrite tensors that are handed in with the reduced gradients."""
        self.divide_()
        torch._foreach_copy_(list(gradients), self._views)

    def fill_nothing_(self) -> None:
        """Fill `gradient` for a worker that has nothing to add and does not count."""
        self.gradient.zero_()
        self._uneven.fill_(1.0)

    def divide_(self) -> None:
        """Once after a reduction: from a mean over workers to one by how much each of them counted.

        Whether to is read from what was reduced, so all workers do the same.
        """
        if self.gradient.is_meta:
            return
        if self._uneven_bits is None:  # where asking would wait for the device
            self.refused = ~self._uneven.isfinite()
            divisor = self._weight.where(self._uneven != 0, 1.0)
            self._gradients.div_(divisor.where(~self.refused, math.nan))
            self._uneven.zero_()
        elif self._uneven_bits[0]:
            self.refused = not self._uneven.isfinite()  # a complex infinity, divided, is NaN
            self._gradients.div_(math.nan if self.refused else self._weight)
            self._uneven_bits[0] = 0

    @torch.no_grad()
    def refuse_(self, gradients: Iterable[Tensor]) -> None:
        """Have no step made with these gradients, since some worker's are not finite."""
        self.refused = True
        for gradient in gradients:
            local(gradient).fill_(math.nan)

    @torch.no_grad()
    def scatter_(self, own: Sequence[Tensor | None]) -> None:
        """Copy the reduced gradients back into what `gather_` returned; a parameter that no worker used keeps
        having none."""
        if self.gradient.is_meta:
            return
        self.divide_()
        grads, views = self._present(own)
        _copy_(grads, views)
        if len(grads) < len(own):
            used_somewhere = self.used_somewhere()
            for parameter, view, used in zip(self.parameters, self._views, used_somewhere, strict=True):
                if parameter.grad is None and used:
                    parameter.grad = as_gradient(parameter, view.clone(memory_format=torch.contiguous_format))

    @torch.no_grad()
    def lend_(self) -> None:
        """Make the reduced gradients the parameters' own as views; none for those no worker used."""
        if self.gradient.is_meta:
            return
        self.divide_()
        used_somewhere = self.used_somewhere()
        try:
            for parameter, view, used in zip(self.parameters, self._views, used_somewhere, strict=True):
                parameter.grad = as_gradient(parameter, view) if used else None
        except RuntimeError:  # torch refuses gradients of another kind than their parameter
            self.check_kind()
            raise

    def plain_views(self) -> list[Tensor | None]:
        """Where the gradient of each parameter lies; None for DTensors, and where there are no numbers."""
        hidden = self.gradient.is_meta
        return [
            None if hidden or local(p) is not p else v
            for p, v in zip(self.parameters, self._views, strict=True)
        ]

    def parts(self) -> tuple[Tensor, Tensor]:
        """The gradients of `gradient`, and its tail."""
        return self._gradients, self._tail

    def used_somewhere(self) -> list[bool]:
        """After a reduction: by parameter, whether any worker used it in this step."""
        used: list[bool] = (self._used != 0).tolist()
        return used

    def mean_weight(self) -> float:
        """After a reduction: how much the workers' gradients counted, on average."""
        return float(self._weight.item())

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
