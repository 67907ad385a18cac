"""Which kernels a tensor gets: Numba's on a CPU, Triton's on a GPU, none where plain torch has to do.

They are loaded when first asked for: importing Numba or Triton takes longer than most commands do.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

from torch import Tensor

_log = logging.getLogger(__name__)


def cpu_kernels(like: Tensor) -> ModuleType | None:
    """The kernels of Numba, if `like` is on a CPU and Numba is there."""
    return _load("cpu", "numba", "pip install 'thinwire[kernels]'") if like.is_cpu else None


def gpu_kernels(like: Tensor) -> ModuleType | None:
    """The kernels of Triton, if `like` is on a GPU and Triton is there."""
    return _load("gpu", "triton", "pip install triton") if like.is_cuda else None


@functools.cache
def _load(module: str, package: str, install: str) -> ModuleType | None:
    try:
        importlib.import_module(package)
        return importlib.import_module(f"thinwire.compress.{module}")
    except Exception as error:  # noqa: BLE001  # Numba fails in its own ways where a script replaced `print`
        slow = "selecting gradients in plain torch, which takes several times as long as with %s (%s: %s): %s"
        remedy = install if isinstance(error, ImportError) else f"import {package} first thing in the script"
        _log.warning(slow, package, type(error).__name__, str(error).partition("\n")[0], remedy)
        return None
