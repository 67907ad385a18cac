"""Numbers that are not sent: those that are not finite, since one worker's NaN would be everybody's after
log2(P) rounds, and complex ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import NumericError, SettingError
from thinwire.strategies.base import Bucket


def check_finite(data: Tensor, bucket: Bucket) -> Tensor:
    """Gives `data`, a bucket's parameters, or raises what names the first that is not finite."""
    if data.is_meta or math.isfinite(data.sum(dtype=torch.float64)):
        return data
    wrong = data.isfinite().logical_not_().nonzero()
    if wrong.numel():  # and not just a sum that is too large
        raise NumericError(
            f"{bucket.name_at(int(wrong[0]))} is not finite, and is not sent",
            hint="look at this worker's data, lower the learning rate or clip gradients",
        )
    return data


def check_real(buckets: Sequence[Bucket], owner: str) -> None:
    """Raise SettingError if parameters are complex, for a strategy that compares or rounds numbers."""
    for bucket in buckets:
        if bucket.gradient.is_complex():
            raise SettingError(
                f"parameter {bucket.name_at(0)} is {bucket.gradient.dtype}; {owner} sends real numbers only",
                hint="use AllReduce(), or view a real parameter by torch.view_as_complex in forward",
            )
