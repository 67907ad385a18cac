"""Kernels that are interpreted."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.compress.kinds import using
from thinwire.compress.select import select_
from thinwire.compress.sparse import SparseLayout, new_message


@pytest.fixture(scope="session", autouse=True)
def parsed_kernels() -> None:
    """Triton's interpreter parses a kernel when it is first called. Python 3.11 cannot always parse where
    hypothesis has changed the depth of recursion (SystemError: AST constructor recursion depth mismatch)."""
    if importlib.util.find_spec("triton") is None:
        return
    with using("triton") as device:
        gradient, residual = torch.ones(4, device=device), torch.zeros(4, device=device)
        layout = SparseLayout(capacity=2, values="fp32", itemsize=4)
        select_(gradient, residual, 0.5, new_message(layout, residual), layout)
