"""The step time that topk.py should find: by arithmetic, on the virtual clock, and in the paper.

`python -m benchmarks.topk_expect` measures the start-up of a message between two hosts of a lab.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.common import lab_worker, run_in_lab
from benchmarks.topk_systems import DDP_BUCKET_MB, STRATEGIES, bucket_bytes_at_scale, scale_of
from thinwire.hosts.description import Description, Host, describe
from thinwire.lab.nets import Net
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_times, traffic
from thinwire.strategies.base import Strategy
from thinwire.timings import BASELINE

RATE_BITS_PER_S = 1e9
PAYLOAD = 1448 / 1514
"""Share of a path that carries data; the rest are headers."""
PAPER_ALPHA_S = 0.436e-3
"""Start-up of a message on the paper's cluster, as its authors measured it."""
_ALONE = {"vgg16": 1317.333, "resnet20": 920.632, "alexnet": 173.469, "resnet50": 52.873, "lstm-ptb": 392.0}
_PAPER: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "vgg16": {
        "ddp": (104.200, 92.560, 39.480, 12.600),
        "topk": (110.576, 109.900, 97.865, 63.002),
        "gtopk": (131.060, 130.551, 126.434, 123.200),
    },
    "resnet20": {
        "ddp": (821.700, 705.200, 520.400, 287.900),
        "topk": (908.837, 752.985, 737.594, 696.029),
        "gtopk": (916.260, 868.730, 808.500, 789.300),
    },
    "alexnet": {
        "ddp": (14.010, 12.118, 4.936, 1.234),
        "topk": (14.238, 13.865, 13.352, 9.236),
        "gtopk": (16.536, 16.446, 16.359, 15.777),
    },
    "resnet50": {
        "ddp": (39.002, 36.989, 23.176, 10.721),
        "topk": (37.729, 35.703, 34.495, 30.583),
        "gtopk": (39.795, 39.713, 39.060, 39.119),
    },
    "lstm-ptb": {
        "ddp": (12.657, 8.7, 4.1, 2.1),
        "topk": (19.9, 18.6, 14.8, 5.4),
        "gtopk": (17.8, 17.6, 15.1, 10.8),
    },
}
"""Samples per second and worker with 4, 8, 16 and 32 workers, and alone: Shi et al., arXiv:1901.04359, as in
the authors' scripts/icdcs2019/communication.py. Their dense runs are no DDP: a ring without overlap."""


def paper_efficiency(net: str, system: str, workers: int) -> float | None:
    """The efficiency that the paper measured in the same cell; None where it has none.

    >>> round(paper_efficiency("resnet50", "gtopk", 32), 2)
    0.74
    """
    found = _PAPER[net].get(system)
    return None if found is None else found[(4, 8, 16, 32).index(workers)] / _ALONE[net]


def strategy_of(system: str) -> Strategy:
    """A strategy with the traffic of this system."""
    return tw.AllReduce() if system == BASELINE else STRATEGIES[system]


def bucket_bytes(system: str, net: Net, workers: int) -> int:
    """The size of this system's buckets for this net."""
    if system == BASELINE:
        return round((DDP_BUCKET_MB << 20) * scale_of(net))
    return bucket_bytes_at_scale(net, strategy_of(system), workers)


def shapes_of(net: Net) -> list[tuple[int, ...]]:
    """The parameters of a net."""
    return [shape for layer in net.layers for shape in layer.shapes]


def alpha_beta_s(system: str, net: Net, workers: int, *, alpha_s: float, bits_per_s: float) -> float:
    """Seconds of a regular step's messages one after another, from its traffic, for the busiest worker."""
    strategy, shapes, size = strategy_of(system), shapes_of(net), bucket_bytes(system, net, workers)
    regular = strategy.adapts_in + 1
    before, after = (
        traffic(shapes, workers, strategy, steps=steps, bucket_bytes=size) for steps in (regular, regular + 1)
    )
    bytes_per_s = PAYLOAD * bits_per_s / 8
    return max(
        alpha_s * (b.messages - a.messages)
        + max(b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes) / bytes_per_s
        for a, b in zip(before, after, strict=True)
    )


def clock_step_s(system: str, net: Net, workers: int) -> float:
    """Seconds per step on the virtual clock at 1 Gbit/s and with the paper's start-up, selecting left out."""
    rate = PAYLOAD * RATE_BITS_PER_S
    hosts = tuple(Host(index=index, rate_bit_per_s=rate) for index in range(workers))
    network = Network(Description(hosts=hosts), latency_s=PAPER_ALPHA_S)
    # The gradients of a layer come together: all its time is that of the one that backward reaches first.
    shares = [
        share if place == len(layer.shapes) - 1 else 0.0
        for layer, share in zip(net.layers, net.shares(), strict=True)
        for place in range(len(layer.shapes))
    ]
    model = ComputeModel(
        forward_s=net.forward_s,
        backward_s=net.backward_s,
        shares=tuple(shares),
        bucket_bytes=bucket_bytes(system, net, workers),
    )
    return step_times(shapes_of(net), network, strategy_of(system), model, steps=2).step_s


# -- the start-up of a message --------------------------------------------------------------------------


def measured_alpha_s() -> float:
    """Seconds that two hosts of a lab take to exchange a few bytes over Gloo, while nothing else runs."""
    outcome = run_in_lab(describe(hosts=2, rate="1gbit"), "benchmarks.topk_expect", time_limit_s=60)
    return float(outcome.reports[0])


def _probe() -> None:
    with lab_worker() as control:
        mine, theirs, peer = torch.ones(16), torch.empty(16), 1 - dist.get_rank()
        times = []
        for _ in range(300):
            began_s = time.perf_counter()
            for work in (dist.irecv(theirs, peer), dist.isend(mine, peer)):
                assert work is not None
                work.wait()
            times.append(time.perf_counter() - began_s)
        if dist.get_rank() == 0:
            control.report(statistics.median(times[50:]))


if __name__ == "__main__":
    _probe()
