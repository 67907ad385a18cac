"""Train PyTorch models on machines joined by ordinary networks."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import apoptosis, data, errors, parallel
    from thinwire.apoptosis.settings import Apoptosis
    from thinwire.elastic.world import Elastic
    from thinwire.engine.attach import attach
    from thinwire.engine.checkpoint import Checkpoint
    from thinwire.engine.core import Stats
    from thinwire.engine.link import Link
    from thinwire.integrations.ddp import ddp_hook
    from thinwire.planner.auto import AutoStrategy
    from thinwire.strategies.all_reduce import AllReduce
    from thinwire.strategies.base import Bucket, Strategy
    from thinwire.strategies.diloco import DiLoCo
    from thinwire.strategies.downpour import Downpour
    from thinwire.strategies.easgd import EASGD
    from thinwire.strategies.gossip_grad import GossipGraD
    from thinwire.strategies.gtopk import GTopK
    from thinwire.strategies.hierarchical_averaging import HierarchicalAveraging
    from thinwire.strategies.oktopk import OkTopK
    from thinwire.strategies.partial_averaging import PartialAveraging
    from thinwire.strategies.post_local import PostLocal
    from thinwire.strategies.sasgd import SASGD
    from thinwire.strategies.silent import Silent
    from thinwire.strategies.stochastic_gradient_push import StochasticGradientPush
    from thinwire.strategies.topk import TopK
    from thinwire.strategies.trickle import Trickle
    from thinwire.wire.tls.files import TLS
    from thinwire.wire.wire import Wire
    from thinwire.wire.work import Work, all_of, any_of, in_background, training_thread

__all__ = [
    "EASGD",
    "SASGD",
    "TLS",
    "AllReduce",
    "Apoptosis",
    "AutoStrategy",
    "Bucket",
    "Checkpoint",
    "DiLoCo",
    "Downpour",
    "Elastic",
    "GTopK",
    "GossipGraD",
    "HierarchicalAveraging",
    "Link",
    "OkTopK",
    "PartialAveraging",
    "PostLocal",
    "Silent",
    "Stats",
    "StochasticGradientPush",
    "Strategy",
    "TopK",
    "Trickle",
    "Wire",
    "Work",
    "__version__",
    "all_of",
    "any_of",
    "apoptosis",
    "attach",
    "data",
    "ddp_hook",
    "errors",
    "in_background",
    "parallel",
    "training_thread",
]

try:
    __version__ = version("thinwire")
except PackageNotFoundError:  # run from its source folder, on a machine where nothing can be installed
    __version__ = "unknown"

# These need torch or numpy, so they are imported on first use: `thinwire --help` must not wait for them.
_HOMES = {
    "AllReduce": "strategies.all_reduce",
    "Apoptosis": "apoptosis.settings",
    "AutoStrategy": "planner.auto",
    "Bucket": "strategies.base",
    "Checkpoint": "engine.checkpoint",
    "DiLoCo": "strategies.diloco",
    "Elastic": "elastic.world",
    "GTopK": "strategies.gtopk",
    "GossipGraD": "strategies.gossip_grad",
    "Link": "engine.link",
    "OkTopK": "strategies.oktopk",
    "SASGD": "strategies.sasgd",
    "Silent": "strategies.silent",
    "Stats": "engine.core",
    "StochasticGradientPush": "strategies.stochastic_gradient_push",
    "Strategy": "strategies.base",
    "TLS": "wire.tls.files",
    "TopK": "strategies.topk",
    "Trickle": "strategies.trickle",
    "PartialAveraging": "strategies.partial_averaging",
    "PostLocal": "strategies.post_local",
    "HierarchicalAveraging": "strategies.hierarchical_averaging",
    "Downpour": "strategies.downpour",
    "EASGD": "strategies.easgd",
    "Wire": "wire.wire",
    "Work": "wire.work",
    "all_of": "wire.work",
    "any_of": "wire.work",
    "attach": "engine.attach",
    "ddp_hook": "integrations.ddp",
    "in_background": "wire.work",
    "training_thread": "wire.work",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"thinwire.{_HOMES[name]}"), name)
    if name in ("apoptosis", "data", "errors", "parallel"):
        return import_module(f"thinwire.{name}")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
