"""Hybrid parallelism: large layers split inside groups of workers, everything else data-parallel."""

from thinwire.parallel.hybridize import hybridize
from thinwire.parallel.plan import HybridPlan, LayerPlan
from thinwire.parallel.whole import full_state_dict

__all__ = ["HybridPlan", "LayerPlan", "full_state_dict", "hybridize"]
