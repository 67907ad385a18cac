"""The systems of topk.py: buckets shrink with the net, so that there are as many messages as at full size."""

from __future__ import annotations

import thinwire as tw
from benchmarks.rivals.ddp import Ddp
from thinwire.bench.systems import BASELINE, Ours, System
from thinwire.strategies.base import Strategy

DENSITY = 0.001
STRATEGIES: dict[str, Strategy] = {
    "topk": tw.TopK(density=DENSITY),
    "gtopk": tw.GTopK(density=DENSITY),
    "oktopk": tw.OkTopK(density=DENSITY),
}


def all_rivals() -> dict[str, System]:
    """What `thinwire.bench` looks for in a module of systems."""
    # They do not adapt to the wire: in their first six steps they only find out whether they pay on it.
    ours = {
        name: Ours(name, strategy, scaled_buckets=True, adapts=False) for name, strategy in STRATEGIES.items()
    }
    return {**ours, BASELINE: Ddp(scaled_buckets=True)}
