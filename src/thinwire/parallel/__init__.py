"""Hybrid parallelism: large layers split inside groups of workers, everything else data-parallel."""

from thinwire.parallel.hybridize import hybridize
from thinwire.parallel.network import Network, measure_network
from thinwire.parallel.plan import HybridPlan, LayerPlan
from thinwire.parallel.scaler import GradScaler
from thinwire.parallel.whole import full_state_dict

__all__ = [
    "GradScaler",
    "HybridPlan",
    "LayerPlan",
    "Network",
    "full_state_dict",
    "hybridize",
    "measure_network",
]
