"""Calls of a model, kept and made again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

JOINED_ROWS, JOINED_CALLS = 256, 4
"""Samples of joined calls, and calls, at most: memory was sized for one call of a training."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copy(self) -> Call:
        return self.map(lambda t: t.detach().clone())

    def first(self, rows: int, *, after: int = 0) -> Call:
        """The same call with fewer samples."""
        return self.map(lambda t: t[after : after + rows] if t.dim() else t)

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def rows(self) -> int:
        """Samples in it."""
        return next((len(t) for t in tensors_in((self.args, self.kwargs)) if t.dim()), 0)

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)


def can_be_joined(model: nn.Module, call: Call) -> bool:
    """Whether the model computes each sample by itself, along the first dimension of all that it is given:
    then several calls are as good as one. Tried with four samples."""
    if call.rows() < 4:
        return False
    try:
        with undisturbed(model):
            whole, early, late = (
                list(tensors_in(part.run(model)))
                for part in (call.first(4), call.first(2), call.first(2, after=2))
            )
        halves = [torch.cat(pair) for pair in zip(early, late, strict=True)]
    except Exception:  # noqa: BLE001 (whatever a model does with fewer samples than it expects)
        return False
    return len(whole) == len(halves) and all(map(close, whole, halves))


def join(calls: Sequence[Call]) -> list[Call]:
    """Fewer and larger calls with the same samples, where arguments are alike."""
    found, room = list[Call](), 0
    for call in calls:
        if found and call.rows() <= room and (both := _together(found[-1], call)) is not None:
            found[-1], room = both, room - call.rows()
        else:
            found.append(call)
            room = min(JOINED_ROWS, JOINED_CALLS * call.rows()) - call.rows()
    return found


def _together(one: Call, other: Call) -> Call | None:
    (ours, form), (theirs, other_form) = (
        torch.utils._pytree.tree_flatten((call.args, dict(call.kwargs))) for call in (one, other)
    )
    if form != other_form:
        return None
    both: list[Any] = []
    for mine, its in zip(ours, theirs, strict=True):
        if isinstance(mine, Tensor) and isinstance(its, Tensor) and mine.dim() == its.dim() > 0:
            if mine.shape[1:] != its.shape[1:]:
                return None
            both.append(torch.cat([mine, its]))
        elif type(mine) is type(its) and isinstance(mine, int | float | str | None) and mine == its:
            both.append(mine)
        else:
            return None
    args, kwargs = torch.utils._pytree.tree_unflatten(both, form)
    return Call(args, kwargs)


def close(expected: Tensor, found: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if expected.shape != found.shape or not expected.is_floating_point():
        return expected.shape == found.shape
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((expected - found).abs().max()) <= tolerance * max(scale, tolerance) if scale else True


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In here the model is in evaluation mode; modes and random numbers are as before after it."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    precise = full_precision() if devices else nullcontext()
    with torch.random.fork_rng(devices=devices), torch.no_grad(), precise:
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def full_precision() -> Iterator[None]:
    """In here GPUs multiply float32 in all of its bits. TF32, which convolutions use by default, keeps 10 of
    23: one neuron less takes another kernel, and results differ by more than they may when compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers its newer switches; but see _without_tf32
        undo = _without_tf32()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in undo:
                each()


def _without_tf32() -> list[Callable[[], None]]:
    """Torch has two sets of switches. Where the newer one was used, reading the older one raises; so it is
    used only if the user has done so."""
    cudnn: Any = torch.backends.cudnn
    undo = list[Callable[[], None]]()

    def switch(owner: Any, name: str, value: object) -> None:
        undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        switch(cudnn, "allow_tf32", False)
    except RuntimeError:
        for part in (cudnn.conv, cudnn.rnn):
            switch(part, "fp32_precision", "ieee")
    try:
        if (before := torch.get_float32_matmul_precision()) != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.append(partial(torch.set_float32_matmul_precision, before))
    except RuntimeError:
        switch(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    return undo


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """All tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for each in value.values() for t in tensors_in(each, depth))
    elif isinstance(value, list | tuple | set):
        yield from (t for each in value for t in tensors_in(each, depth))
    elif depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from (t for each in vars(value).values() for t in tensors_in(each, depth - 1))
