"""The systems of topk.py: buckets shrink with the net, so that there are as many messages as at full size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed import get_world_size
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from benchmarks.rivals import Joined
from benchmarks.rivals.ddp import Ddp, joined
from thinwire.bench.systems import BASELINE, Ours, System
from thinwire.engine.attach import attach, usual_bucket_bytes
from thinwire.engine.link import Link
from thinwire.lab.emulate import Emulated
from thinwire.lab.nets import Net
from thinwire.strategies.base import Strategy

DDP_BUCKET_MB = 25
"""torch's own."""
DENSITY = 0.001
STRATEGIES: dict[str, Strategy] = {
    "topk": tw.TopK(density=DENSITY),
    "gtopk": tw.GTopK(density=DENSITY),
    "oktopk": tw.OkTopK(density=DENSITY),
}


def bucket_bytes_at_scale(net: Net, strategy: Strategy, world_size: int) -> int:
    """How large buckets have to be for as many as the net has that this one stands for."""
    whole = round(4 * net.num_params / net.scale)
    return round(usual_bucket_bytes(whole, strategy, world_size) * net.scale)


@dataclass(frozen=True, slots=True)
class Scaled(Ours):
    """A strategy of ours whose buckets shrink with the net."""

    @property
    def adapts_in(self) -> int:
        return 0  # in its first steps it only finds out whether it pays

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Link:
        assert isinstance(model, Emulated), "only emulated nets have a scale"
        size = bucket_bytes_at_scale(model.net, self.strategy, get_world_size())
        return attach(model, optimizer, self.strategy, bucket_bytes=size)


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
    ours = {name: Scaled(name, strategy) for name, strategy in STRATEGIES.items()}
    return {**ours, BASELINE: ScaledDdp()}
