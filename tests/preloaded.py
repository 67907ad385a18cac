"""Imported once by the server that worker processes are forked from; see tests/worlds.py."""

from __future__ import annotations

import atexit
import gc
import importlib
import os

MODULES = (
    "torch._dynamo",  # loaded by the first optimizer step, which takes as long as importing torch
    "torch.distributed.fsdp",
    "numba",
    "pytest",
    "tests.patience",
    "tests.worlds",
    "thinwire.cli",
    "thinwire.recipes.train",
    "thinwire.simulate",
)

for module in MODULES:
    importlib.import_module(module)


def _end_server(pid: int) -> None:
    if os.getpid() == pid:  # workers inherit this handler
        os._exit(0)


# Workers share the memory of these objects, and leave them out when they collect garbage at their end, which
# would take a second. The server itself does not clean up.
gc.freeze()
atexit.register(_end_server, os.getpid())
