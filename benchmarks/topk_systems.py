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
from thinwire.bench.systems import Ours, System
from thinwire.engine.attach import attach
from thinwire.engine.cut import default_bucket_bytes
from thinwire.engine.link import Link
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import Net, known_net
from thinwire.strategies.base import Strategy
from thinwire.timings import BASELINE

DDP_BUCKET_MB = 25
"""torch's default."""
DENSITY = 0.001
STRATEGIES: dict[str, Strategy] = {
    "topk": tw.TopK(density=DENSITY),
    "gtopk": tw.GTopK(density=DENSITY),
    "oktopk": tw.OkTopK(density=DENSITY),
}


def scale_of(net: Net) -> float:
    """Its number of parameters, relative to the published net."""
    return net.num_params / known_net(net.name).num_params


def bucket_bytes_at_scale(net: Net, strategy: Strategy, world_size: int) -> int:
    """The bucket size that gives a scaled net as many buckets as the net at full size."""
    whole = 4 * known_net(net.name).num_params
    return round(default_bucket_bytes(whole, strategy, world_size) * scale_of(net))


@dataclass(frozen=True, slots=True)
class ScaledOurs(Ours):
    """A strategy of ours whose buckets shrink with the net."""

    @property
    def adapts_in(self) -> int:
        return 0  # its first steps only probe whether it pays

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Link:
        assert isinstance(model, EmulatedModel), "only emulated nets have a scale"
        size = bucket_bytes_at_scale(model.net, self.strategy, get_world_size())
        return attach(model, optimizer, self.strategy, bucket_bytes=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledDdp(Ddp):
    """DDP whose buckets shrink with the net."""

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        assert isinstance(model, EmulatedModel), "only emulated nets have a scale"
        scale = scale_of(model.net)
        # At full size torch's own choice, which makes the first bucket smaller. It takes fractions.
        cap_mb = None if scale == 1 else DDP_BUCKET_MB * scale
        return joined(DistributedDataParallel(model, bucket_cap_mb=cap_mb), optimizer)


def all_rivals() -> dict[str, System]:
    """The systems, for `thinwire.bench`."""
    ours = {name: ScaledOurs(name, strategy) for name, strategy in STRATEGIES.items()}
    return {**ours, BASELINE: ScaledDdp()}
