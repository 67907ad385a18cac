"""The systems of topk.py: buckets shrink with the net, so that there are as many messages as at full size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from benchmarks.rivals import Joined
from benchmarks.rivals.ddp import Ddp, joined
from thinwire.bench.systems import BASELINE, Ours, System
from thinwire.lab.emulate import Emulated
from thinwire.strategies.base import Strategy

DDP_BUCKET_MB = 25
"""torch's own."""
DENSITY = 0.001
STRATEGIES: dict[str, Strategy] = {
    "topk": tw.TopK(density=DENSITY),
    "gtopk": tw.GTopK(density=DENSITY),
    "oktopk": tw.OkTopK(density=DENSITY),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledDdp(Ddp):
    """DDP whose buckets shrink with the net."""

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        assert isinstance(model, Emulated), "only emulated nets have a scale"
        scale = model.net.scale
        # At full size torch's own, which makes the first one smaller. It wants whole ones, and takes any.
        cap_mb = None if scale == 1 else DDP_BUCKET_MB * scale
        return joined(DistributedDataParallel(model, bucket_cap_mb=cap_mb), optimizer)


def all_rivals() -> dict[str, System]:
    """What `thinwire.bench` looks for in a module of systems."""
    # They do not adapt to the wire: in their first six steps they only find out whether they pay on it.
    ours = {
        name: Ours(name, strategy, scaled_buckets=True, adapts=False) for name, strategy in STRATEGIES.items()
    }
    return {**ours, BASELINE: ScaledDdp()}
