"""The systems of exact.py and exact_lab.py: DDP and AllReduce with several bucket sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from benchmarks.rivals import Joined
from benchmarks.rivals.ddp import Ddp, joined
from thinwire.bench.systems import Ours, System

MIB = 1 << 20
BUCKET_COUNTS = (4, 8, 16)
CAPS_MB = (1, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketedDdp:
    """DDP with a given number of equal buckets."""

    num_buckets: int
    period: int = 1

    @property
    def name(self) -> str:
        return f"ddp-{self.num_buckets}-buckets"

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        total_bytes = sum(parameter.nbytes for parameter in model.parameters())
        # A bucket is closed once it has reached the cap; the margin is for rounding. DDP takes fractions.
        cap_mb = 0.999 * total_bytes / self.num_buckets / MIB
        return joined(DistributedDataParallel(model, bucket_cap_mb=cap_mb), optimizer)


def all_rivals() -> dict[str, System]:
    """All systems that are not just a strategy with its own choice of buckets."""
    systems: list[System] = [BucketedDdp(num_buckets=count) for count in BUCKET_COUNTS]
    systems += [Ddp(name=f"ddp-{cap_mb}mb", bucket_cap_mb=cap_mb) for cap_mb in CAPS_MB]
    # Not called "ddp", which would be added to every cell.
    systems += [Ddp(name="ddp-25mb"), Ddp(name="ddp-4mb-views", bucket_cap_mb=4, views=True)]
    for overlap in ("backward", "none"):
        strategy = tw.AllReduce(overlap=overlap)
        systems.append(Ours(f"all-reduce-{overlap}-4mb", strategy, bucket_bytes=4 * MIB))
    return {system.name: system for system in systems}
