"""The paths between workers, as far as a choice of groups needs them: given, or measured in the job."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.errors import check

_SMALL_BYTES, _LARGE_BYTES = 8, 1 << 20
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How fast every worker can send to the others."""

    bits_per_s: float
    """Rate of one worker, in one direction."""
    latency_s: float = 0.0
    """Latency of one message."""

    def __post_init__(self) -> None:
        check(self.bits_per_s > 0, "bits_per_s", "positive", self.bits_per_s)
        check(self.latency_s >= 0, "latency_s", "0 or more", self.latency_s)

    def seconds(self, sent_bytes: float, messages: float) -> float:
        return 8 * sent_bytes / self.bits_per_s + messages * self.latency_s


def measure_network() -> Network:
    """Rate and latency of an all-gather among all workers, the slowest one's; called by all of them."""
    workers = dist.get_world_size()
    if workers == 1:
        return Network(bits_per_s=1e12)
    small_s, large_s = (_all_gather_s(num_bytes, workers) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    sent_bytes = (workers - 1) * _LARGE_BYTES
    rate = 8 * sent_bytes / max(large_s - small_s, 1e-9)
    return Network(bits_per_s=rate, latency_s=small_s / (workers - 1))


def _all_gather_s(num_bytes: int, workers: int) -> float:
    """The median of a few, on the slowest worker: all must agree on it."""
    data, out = torch.zeros(num_bytes // 4), torch.empty(workers * num_bytes // 4)
    group = dist.group.WORLD
    assert group is not None
    taken = []
    for _ in range(_TRIES + 1):  # the first one connects
        began_s = time.perf_counter()
        group._allgather_base(out, data).wait()
        taken.append(time.perf_counter() - began_s)
    median = torch.tensor([sorted(taken[1:])[_TRIES // 2]], dtype=torch.float64)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)
