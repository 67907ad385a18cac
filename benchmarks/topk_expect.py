"""What a step of topk.py should take: by arithmetic, on the virtual clock, and in the paper.

`python -m benchmarks.topk_expect` is what two hosts of a lab run to measure the start-up of a message.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn import Parameter

import thinwire as tw
from benchmarks.topk_systems import DDP_BUCKET_MB, STRATEGIES, bucket_bytes_at_scale
from thinwire.bench.systems import BASELINE
from thinwire.engine.buckets import make_buckets
from thinwire.hosts.description import Description, Host, describe
from thinwire.lab.control import Control
from thinwire.lab.job import Job
from thinwire.lab.nets import Net
from thinwire.lab.run import run
from thinwire.simulate.network import Network, hops
from thinwire.simulate.pace import Compute
from thinwire.simulate.sizes import pace
from thinwire.simulate.worker import Ways
from thinwire.strategies.base import Strategy
from thinwire.traffic import Cluster, Round, Sizes

RATE_BITS_PER_S = 1e9
PAYLOAD = 1448 / 1514
"""Of what a path carries; the rest are headers."""
PAPER_ALPHA_S = 0.436e-3
"""Start-up of a message on the paper's cluster, as its authors measured it."""
REGULAR_STEP = 100
"""Any step after the first few, in which sparse strategies try out something else."""
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
    """What the paper measured in the same cell; None where it has nothing.

    >>> round(paper_efficiency("resnet50", "gtopk", 32), 2)
    0.74
    """
    found = _PAPER[net].get(system)
    return None if found is None else found[(4, 8, 16, 32).index(workers)] / _ALONE[net]


def strategy_of(system: str) -> Strategy:
    """What sends as this system does."""
    return tw.AllReduce() if system == BASELINE else STRATEGIES[system]


def bucket_bytes(system: str, net: Net, workers: int) -> int:
    """As large as this system's buckets of this net are."""
    if system == BASELINE:
        return round((DDP_BUCKET_MB << 20) * net.scale)
    return bucket_bytes_at_scale(net, strategy_of(system), workers)


def sizes_of(net: Net, num_bytes: int) -> Sizes:
    """The buckets of a net."""
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    named = [(str(i), Parameter(torch.empty(shape, device="meta"))) for i, shape in enumerate(shapes)]
    made = make_buckets(named, num_bytes)
    return Sizes(
        tuple((b.gradient.numel(), b.gradient.element_size()) for b in made),
        exact=tuple(b.gradient.numel() - b.exact_from for b in made),
    )


def alpha_beta_s(system: str, net: Net, workers: int, *, alpha_s: float, bits_per_s: float) -> float:
    """All rounds of a step one after another, by the strategy's own `rounds`, for the busiest worker."""
    sizes = sizes_of(net, bucket_bytes(system, net, workers))
    rounds = list(strategy_of(system).rounds(sizes, Cluster(world_size=workers), REGULAR_STEP))
    bytes_per_s = PAYLOAD * bits_per_s / 8
    return max(
        sum(_round_s(each, rank, workers, alpha_s, bytes_per_s) for each in rounds) for rank in range(workers)
    )


def _round_s(what: Round, rank: int, workers: int, alpha_s: float, bytes_per_s: float) -> float:
    traffic = what.traffic(rank, workers)
    num_bytes = max(traffic.sent_bytes, traffic.received_bytes)
    if num_bytes == 0:
        return 0.0
    in_a_row = 1 if what.op == "exchange" else hops(what, workers)
    return in_a_row * alpha_s + num_bytes / bytes_per_s


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
    ways = Ways(
        compute=Compute(forward_s=net.forward_s, backward_s=net.backward_s),
        shares=tuple(shares),
        bucket_bytes=bucket_bytes(system, net, workers),
    )
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    return pace(shapes, network, strategy_of(system), ways, steps=2).step_s


# -- the start-up of a message --------------------------------------------------------------------------


def measured_alpha_s() -> float:
    """Seconds that two hosts of a lab take to exchange a few bytes over Gloo, while nothing else runs."""
    command = ("-m", "benchmarks.topk_expect")
    outcome = run(Job(description=describe(hosts=2, rate="1gbit"), command=command, time_limit_s=60))
    if outcome.exit_code != 0:
        raise SystemExit(f"the probe ended with exit code {outcome.exit_code}")
    return float(outcome.reports[0])


def _probe() -> None:
    control = Control.of_this_worker()
    assert control is not None, "only in a lab"
    dist.init_process_group("gloo")
    mine, theirs, peer = torch.ones(16), torch.empty(16), 1 - dist.get_rank()
    times = []
    for _ in range(300):
        began_s = time.perf_counter()
        receiving, sending = dist.irecv(theirs, peer), dist.isend(mine, peer)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
        times.append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        control.report(statistics.median(times[50:]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _probe()
