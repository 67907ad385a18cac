"""The flat tensor in which the gradients of a bucket travel, and the bookkeeping that travels with them.

Layout of `data`: the gradients (large tensors, then small ones), and a tail: how much this worker's gradients
count, a flag that says whether that is something else than 1 (infinite: some gradient is not finite, and none
is sent), and one flag per parameter that says whether this step used it. So everything that must arrive exact
is one piece at the end, and what one worker decides all of them see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.engine.span import views

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlatGradient:
    """Is filled by each worker, reduced over workers, and divided by how much the workers counted."""

    def __init__(self, shapes: Sequence[torch.Size], like: Tensor) -> None:
        """`like` has the dtype and the device."""
        count, tail = sum(shape.numel() for shape in shapes), 2 + len(shapes)
        self.data = torch.zeros(count + tail, dtype=like.dtype, device=like.device)
        self.gradients: Tensor = self.data[:count]
        self.tail: Tensor = self.data[count:]
        self.views = views(self.gradients, shapes)
        """Where each gradient lies."""
        self.refused: bool | Tensor = False
        """Whether the gradients of some worker were not finite, so that no step may be made with them."""
        self._weight, self._uneven, self._used = self.tail.split([1, 1, len(shapes)])
        self._usual_tail = torch.ones_like(self.tail)
        self._usual_tail[1] = 0.0
        complex_ = self.data.is_complex()
        self._reals = (torch.view_as_real(self.gradients) if complex_ else self.gradients).view(-1)
        # Asking torch for one number takes longer than all the rest of a small bucket's way back.
        bits = _BITS.get(self.data.element_size()) if self.data.is_cpu else None
        self._uneven_bits = None if bits is None else self._uneven.view(bits).numpy()
        self._sum = torch.zeros((), dtype=torch.promote_types(self._reals.dtype, torch.float32))
        self._sum_number = self._sum.numpy()

    # -- before a reduction -------------------------------------------------------------------------

    def complete_(self, weight: float = 1.0, unused: Sequence[int] = ()) -> int | None:
        """Once gradients are in their views: fill the tail, with zeros for parameters that this step has not
        used, and hold back what is not finite; gives where the first such number lies, if that is known."""
        self.tail.copy_(self._usual_tail)
        for place in unused:
            self.views[place].zero_()
            self._used[place] = 0.0
        if weight != 1.0:
            self.gradients.mul_(weight)
            self._weight.fill_(weight)
            self._uneven.fill_(1.0)
        return self._hold_back_()

    def _hold_back_(self) -> int | None:
        """Send zeros and a flag instead of gradients that are not finite."""
        if self.data.is_meta:
            return None
        if not self.data.is_cpu:  # where asking would wait for the device
            fine = self.gradients.isfinite().all()
            self.gradients.mul_(fine).nan_to_num_(0.0)
            self._uneven.copy_(torch.where(fine, self._uneven, math.inf))
            return None
        torch.sum(self._reals, dim=0, dtype=self._sum.dtype, out=self._sum)
        if math.isfinite(self._sum_number):
            return None
        wrong = self.gradients.isfinite().logical_not_().nonzero()
        if not wrong.numel():  # just a sum that is too large
            return None
        self.gradients.zero_()
        self._uneven.fill_(math.inf)
        return int(wrong[0])

    def fill_nothing_(self) -> None:
        """Fill it for a worker that has nothing to add and does not count."""
        self.data.zero_()
        self._uneven.fill_(1.0)

    # -- after a reduction --------------------------------------------------------------------------

    def divide_(self) -> None:
        """Once after a reduction: from a mean over workers to one by how much each of them counted.

        Whether to is read from what was reduced, so all workers do the same.
        """
        if self.data.is_meta:
            return
        if self._uneven_bits is None:  # where asking would wait for the device
            self.refused = ~self._uneven.isfinite()
            divisor = self._weight.where(self._uneven != 0, 1.0)
            self.gradients.div_(divisor.where(~self.refused, math.nan))
            self._uneven.zero_()
        elif self._uneven_bits[0]:
            self.refused = not self._uneven.isfinite()  # a complex infinity, divided, is NaN
            self.gradients.div_(math.nan if self.refused else self._weight)
            self._uneven_bits[0] = 0

    def used_somewhere(self) -> list[bool]:
        """By parameter, whether any worker used it in this step."""
        used: list[bool] = (self._used != 0).tolist()
        return used

    def mean_weight(self) -> float:
        """How much the workers' gradients counted, on average."""
        return float(self._weight.item())
