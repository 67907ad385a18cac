"""What is not finite is not sent: one worker's NaN would be everybody's after log2(P) rounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.errors import NumericError
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
