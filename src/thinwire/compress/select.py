"""Which numbers of a gradient are sent now: those above a threshold, or exactly the k largest.

One pass over memory adds the gradient to the residual, compares, writes index and value of what is selected
into a message and takes it out of the residual. Nothing is lost: what is not selected, what the message has
no room for, and what rounding to bfloat16 cuts off stay in the residual and are sent later.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from thinwire.compress import sparse
from thinwire.compress.kernels import cpu_kernels, gpu_kernels
from thinwire.compress.sparse import COUNT, PASSED, Sparse, SparseLayout, index_part, largest_mask, value_part
from thinwire.errors import NumericError

_SAMPLE = 1 << 16
"""Numbers looked at to guess a threshold from below; where there are not more, there is nothing to gain."""


@torch.no_grad()
def select_(
    gradient: Tensor, residual: Tensor, threshold: float | Tensor, message: Tensor, layout: SparseLayout
) -> None:
    """residual += gradient; what is then larger than `threshold` moves from the residual to the message.

    Entries come in order of their index; if there are more than the message has room for, the last ones stay
    in the residual. Zeros are never selected. A NaN or an infinity spoils the residual; the message then
    says so, and `read` raises.
    """
    assert gradient.shape == residual.shape == (residual.numel(),), "both are flat, and of one size"
    assert residual.is_contiguous(), "the residual is contiguous"
    assert 0 < residual.numel() <= sparse.LARGEST_INDEX, "indices are int32"
    if kernels := gpu_kernels(residual):
        if not isinstance(threshold, Tensor):
            threshold = torch.full((), threshold, dtype=torch.float32, device=residual.device)
        kernels.accumulate_select(gradient, residual, threshold, message, layout)
        return
    threshold = ctypes.c_float(float(threshold)).value  # in float32, whatever the dtype of the residual is
    assert 0 <= threshold < math.inf, threshold
    index, value = index_part(message, layout), value_part(message, layout)
    exact = value if layout.values == "fp32" else residual.new_empty(layout.capacity)
    if kernels := cpu_kernels(residual):
        count, passed = kernels.accumulate_select(gradient, residual, threshold, index, exact)
    else:
        count, passed = accumulate_select_torch(gradient, residual, threshold, index, exact)
    message[COUNT] = count
    message[PASSED] = passed
    if layout.values == "bf16" and count != sparse.NOT_FINITE:
        _round_(value[:count], Sparse(index[:count], exact[:count]), residual)


def accumulate_select_torch(
    gradient: Tensor, residual: Tensor, threshold: float, index: Tensor, value: Tensor
) -> tuple[int, int]:
    """What the kernels do, in plain torch: how many were moved (-1: not finite), how many passed."""
    residual.add_(gradient)
    if not bool(residual.isfinite().all()):
        return sparse.NOT_FINITE, 0
    selected = (residual.abs() > threshold).nonzero().view(-1)
    passed = selected.numel()
    selected = selected[: index.numel()]
    count = selected.numel()
    index[:count] = selected
    value[:count] = residual[selected]
    residual[selected] = 0
    return count, passed


@torch.no_grad()
def select_largest_(
    gradient: Tensor, residual: Tensor, k: int, message: Tensor, layout: SparseLayout
) -> None:
    """As `select_`, but exactly the k largest, or all there are; of equal ones those of lower index."""
    k = min(k, residual.numel())
    assert 1 <= k <= layout.capacity, "a message has room for at least one, and for all that are selected"
    wide = SparseLayout(capacity=max(2 * k, 1024), itemsize=residual.itemsize)
    candidates = sparse.new_message(wide, residual)
    select_(gradient, residual, _below(gradient, residual, k), candidates, wide)
    if int(candidates[COUNT]) == sparse.NOT_FINITE:
        message[COUNT] = sparse.NOT_FINITE
        return
    entries = sparse.read(candidates, wide)
    if k <= entries.index.numel() == int(candidates[PASSED]):
        entries, rest = sparse.keep_largest(entries, k)
        sparse.add_(residual, rest)
    else:  # a poor guess: put all back, and look at everything
        sparse.add_(residual, entries)
        selected = largest_mask(residual, k).nonzero().view(-1)
        entries = Sparse(selected.int(), residual[selected])
        residual[selected] = 0
    sparse.write_(message, layout, entries)
    if layout.values == "bf16":
        _round_(value_part(message, layout)[:k], entries, residual)


def _below(gradient: Tensor, residual: Tensor, k: int) -> float:
    """A threshold that probably more than k numbers pass, but not 2k; from a sample."""
    sample = magnitudes(gradient, residual, max(1, residual.numel() // _SAMPLE))
    expected = k * sample.numel() / residual.numel()
    rank = math.ceil(1.2 * expected + 4 * math.sqrt(expected))
    if rank > sample.numel():
        return 0.0
    return float(sample.topk(rank, sorted=False).values.min())


def magnitudes(gradient: Tensor, residual: Tensor, stride: int, start: int = 0) -> Tensor:
    """Every `stride`-th magnitude of what the residual will be with the gradient added, in float32.

    What is not finite is made so: selecting, which looks at all of them, is what refuses it.
    """
    return (residual[start::stride] + gradient[start::stride]).abs_().float().nan_to_num_()


def _round_(wire: Tensor, entries: Sparse, residual: Tensor) -> None:
    """Write values in fewer bits, and leave in the residual what that cuts off."""
    most = torch.finfo(wire.dtype).max  # what is larger must not become infinite
    wire.copy_(entries.value.clamp(-most, most))
    residual[entries.index] = entries.value - wire.to(residual.dtype)


def refuse(residual: Tensor, name_at: Callable[[int], str]) -> NoReturn:
    """Raise the error that names the parameter of the first number that is not finite."""
    index = int((~residual.isfinite()).nonzero()[0])
    value = float(residual[index])
    raise NumericError(
        f"the gradient of {name_at(index)} is {value}, and what is not finite cannot be kept for later steps",
        hint="lower the learning rate, clip gradients, or train in float32 or bfloat16 instead of float16",
    )


def prepare(like: Tensor) -> None:
    """Load and compile the kernels for residuals like this, which else the first step would do."""
    layout = SparseLayout(capacity=16, itemsize=like.itemsize)
    zeros = like.new_zeros(4096)
    message = sparse.new_message(layout, zeros)
    select_(zeros, zeros.clone(), 1.0, message, layout)
    message = message.cpu()  # on a GPU too, messages are merged by the host
    entries = sparse.read(message, layout)
    sparse.keep_largest(sparse.merge(entries, entries), 1)
    sparse.merge_messages_(message, message.clone(), layout, share=(0, 1))
