"""Train PyTorch models on machines joined by ordinary networks."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from thinwire import errors
from thinwire.strategies.all_reduce import AllReduce
from thinwire.strategies.gossip_grad import GossipGraD
from thinwire.strategies.gtopk import GTopK
from thinwire.strategies.oktopk import OkTopK
from thinwire.strategies.silent import Silent
from thinwire.strategies.topk import TopK

if TYPE_CHECKING:
    from thinwire import data
    from thinwire.engine.attach import attach
    from thinwire.engine.checkpoint import Checkpoint
    from thinwire.engine.link import Link
    from thinwire.engine.stats import Stats
    from thinwire.integrations.ddp import ddp_hook

__all__ = [
    "AllReduce",
    "Checkpoint",
    "GTopK",
    "GossipGraD",
    "Link",
    "OkTopK",
    "Silent",
    "Stats",
    "TopK",
    "__version__",
    "attach",
    "data",
    "ddp_hook",
    "errors",
]

__version__ = version("thinwire")

# What needs torch or numpy is imported on first use: `thinwire --help` must not wait for it.
_LAZY = {
    "Checkpoint": "thinwire.engine.checkpoint",
    "Link": "thinwire.engine.link",
    "Stats": "thinwire.engine.stats",
    "attach": "thinwire.engine.attach",
    "ddp_hook": "thinwire.integrations.ddp",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "data":
        return import_module("thinwire.data")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
