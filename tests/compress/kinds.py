"""Selection by every kind of kernel: plain torch, Numba, and Triton, interpreted where there is no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch

from thinwire.compress import select, sparse
from thinwire.compress.kernels import cpu_kernels


def _missing(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


KINDS = [
    "torch",
    pytest.param("numba", marks=_missing("numba")),
    pytest.param("triton", marks=_missing("triton")),
]
WITHOUT_TRITON = KINDS[:2]


@contextmanager
def using(kind: str) -> Iterator[str]:
    """Select by this kind of kernel; the device that tensors must be on."""
    if kind == "triton":
        from thinwire.compress import gpu

        # NumPy, which the interpreter computes with, would warn of what becomes infinite.
        with patch.object(select, "gpu_kernels", lambda _: gpu), np.errstate(over="ignore", invalid="ignore"):
            yield "cuda" if torch.cuda.is_available() else "cpu"
    elif kind == "numba":
        assert cpu_kernels(torch.zeros(1)) is not None
        yield "cpu"
    else:
        with (
            patch.object(select, "cpu_kernels", lambda _: None),
            patch.object(sparse, "cpu_kernels", lambda _: None),
        ):
            yield "cpu"
