"""Models as arrays that travel between processes as plain bytes, and how far two of them are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

Arrays = dict[str, "np.ndarray[Any, Any]"]


def arrays(model: nn.Module) -> Arrays:
    """Parameters and buffers; as float64, which numpy has and which holds every narrower number exactly."""
    return {name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()}


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest distance of an array, relative to its norm."""
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    distances = [norm(ours[n] - theirs[n]) / (norm(theirs[n]) or 1.0) for n in theirs]
    return float(np.max(distances))  # unlike max, not a number if one of them is none


def same_bits(ours: Arrays, theirs: Arrays) -> bool:
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[name], theirs[name]) for name in theirs)
