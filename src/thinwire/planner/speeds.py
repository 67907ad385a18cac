"""How fast workers are, each alone and all at once over Gloo; in a process group of all of them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from thinwire.compress.select import prepare, select_
from thinwire.compress.sparse import SparseLayout, new_message
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.probe import quickest
from thinwire.wire.values import gather_values

SMALL, LARGE_S, TRIES = 8, 0.25, 5
"""Numbers in a message that only shows latency; seconds that a transfer should take; tries of each."""
SERIES = 3
LEAST_MESSAGE_BYTES = 8192
"""Smallest message of a ring whose bandwidth is measured."""
SPEED_S = 0.15
"""Duration of each measurement of a worker alone."""
COPIED, SELECTED = 1 << 22, 1 << 22
"""Numbers that are copied, and selected from."""
LEAST_SPREAD = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of one worker by itself."""

    steps_per_s: float
    """Steps of a small reference training per second."""
    copy_bytes_per_s: float
    select_numbers_per_s: float

    @staticmethod
    def best(tries: Sequence[Speeds]) -> Speeds:
        """The best of several tries: other programs can only make a worker slower."""
        each = [asdict(one) for one in tries]
        return Speeds(**{name: max(one[name] for one in each) for name in each[0]})


# -- one worker alone -----------------------------------------------------------------------------------


def gather_speeds(same: Sequence[bool], turns: int | None = None) -> list[Speeds]:
    """Speeds of all workers; `same`: by rank, who shares this worker's machine, so that they take turns."""
    rank = dist.get_rank()
    own = Speeds(steps_per_s=0, copy_bytes_per_s=0, select_numbers_per_s=0)
    for turn in range(turns or len(same)):
        if turn == sum(same[:rank]):
            own = _own_speeds()
        dist.barrier()
    return [Speeds(**each) for each in gather_values(asdict(own))]


def _reference_step() -> Callable[[], None]:
    """A step of a small training, on the processor."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(64, 256)

    def step() -> None:  # through an optimizer, as trainings do
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _own_speeds() -> Speeds:
    step = _reference_step()
    source = torch.randn(COPIED)
    target, residual = torch.empty_like(source), torch.zeros(SELECTED)
    layout = SparseLayout(capacity=SELECTED // 1000)
    message = new_message(layout, residual)
    prepare(residual)
    gradient = torch.randn(SELECTED)
    for warm_up in (step, step):
        warm_up()
    return Speeds(
        steps_per_s=1 / quickest(step, SPEED_S),
        copy_bytes_per_s=source.nbytes / quickest(lambda: target.copy_(source), SPEED_S),
        select_numbers_per_s=SELECTED
        / quickest(lambda: select_(gradient, residual.zero_(), 3.5, message, layout), SPEED_S),
    )


# -- all at once ----------------------------------------------------------------------------------------


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _message_s(work: Callable[[], object]) -> float:
    """Seconds of the slowest worker: the median of tries, in the best of some series of them, since what
    disturbs a series only adds to it."""
    return min(_median_s(work, 2 * TRIES)[0] for _ in range(SERIES))


def _median_s(work: Callable[[], object], tries: int) -> tuple[float, float]:
    """The median of the slowest worker's seconds, and how far quartiles are from it."""
    taken = []
    for _ in range(tries):
        dist.barrier()
        begin_s = time.perf_counter()
        work()
        taken.append(_slowest(time.perf_counter() - begin_s))
    middle = statistics.median(taken)
    low, _, high = statistics.quantiles(taken, n=4)
    return middle, (high - low) / 2 / middle


def _ring_s(numbers: torch.Tensor, parts: int) -> None:
    works = [dist.all_reduce(part, async_op=True) for part in numbers.chunk(parts)]
    for work in works:
        assert work is not None
        work.wait()


def _neighbours(out: torch.Tensor, into: torch.Tensor) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The receive comes first: with the send first, Gloo uses one direction at a time.
    receiving = dist.irecv(into, (rank - 1) % world_size)
    sending = dist.isend(out, (rank + 1) % world_size)
    for work in (receiving, sending):
        assert work is not None
        work.wait()


@contextmanager
def computing() -> Iterator[None]:
    """Compute beside what is measured: on a GPU if there is one, else on one thread of the processor."""
    stop = threading.Event()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(512, 512, device=device)

    def compute() -> None:
        while not stop.is_set():
            torch.mm(matrix, matrix)
            if device == "cuda":
                torch.cuda.synchronize()

    worker = threading.Thread(target=compute)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class AtOnce:
    """Latencies and rate that all workers reach together."""

    hop_s: float
    latency_s: float
    bit_per_s: float
    spread: float


def at_once(slowest_bit_per_s: float) -> AtOnce:
    """Measure all workers in one ring, and every worker with its neighbours."""
    world_size = dist.get_world_size()
    few, into = torch.ones(SMALL), torch.empty(SMALL)
    hops, share = 2 * (world_size - 1), 2 * (world_size - 1) / world_size
    _ring_s(few, 1)
    _neighbours(few, into)
    hop_s = _message_s(lambda: _ring_s(few, 1))
    latency_s = _message_s(lambda: _neighbours(few, into))
    parts = 4
    # on a slow wire it takes longer: of messages that are too small, headers would be a large part
    least, itemsize = world_size * parts * LEAST_MESSAGE_BYTES, few.element_size()
    count = int(max(least, LARGE_S * slowest_bit_per_s / 8 / share)) // itemsize // parts * parts
    numbers = torch.ones(count)
    whole_s, spread = _median_s(lambda: _ring_s(numbers, parts), TRIES)
    # The parts are under way together: the hops of one hide behind the bytes of the others.
    sending_s = max(whole_s - hop_s, 1e-6)
    return AtOnce(
        hop_s=hop_s / hops,
        latency_s=latency_s,
        bit_per_s=8 * share * numbers.nbytes / sending_s,
        spread=spread,
    )


def processor_s_per_byte(bit_per_s: float) -> float:
    """Processor seconds that sending a byte, and receiving one meanwhile, takes from computing.

    All workers compute, with and without a ring on the wire by turns; the middle of tries and workers.
    """
    step, world_size = _reference_step(), dist.get_world_size()
    share = 2 * (world_size - 1) / world_size
    numbers = torch.zeros(max(world_size, int(LARGE_S * bit_per_s / 8 / share / 4)))
    taken = list[float]()
    step()
    for _ in range(TRIES):
        plain_per_s, _ = _steps_beside(step, lambda: time.sleep(LARGE_S))
        busy_per_s, busy_s = _steps_beside(step, lambda: _ring_s(numbers, 4))
        taken.append((1 - busy_per_s / plain_per_s) * busy_s / (share * numbers.nbytes))
    return max(0.0, float(statistics.median(gather_values(statistics.median(taken)))))


def _steps_beside(step: Callable[[], None], work: Callable[[], object]) -> tuple[float, float]:
    """Steps per second beside some work of another thread, and how long that took; on all workers at once."""
    other = threading.Thread(target=work)
    dist.barrier()
    began_s, count = time.perf_counter(), 0
    other.start()
    while other.is_alive():
        step()
        count += 1
    taken_s = time.perf_counter() - began_s
    other.join()
    return count / taken_s, taken_s


def cluster_of(bit_per_s: float, speeds: Sequence[Speeds]) -> Cluster:
    """Equal hosts that emulate accelerators, as in the lab, whose paths are shaped to this rate."""
    found = at_once(bit_per_s)
    hosts = [ClusterHost(name=f"host{rank}", rate_bit_per_s=found.bit_per_s) for rank in range(len(speeds))]
    return cluster_from(hosts, found, speeds)


def cluster_from(
    hosts: Sequence[ClusterHost],
    found: AtOnce,
    speeds: Sequence[Speeds],
    *,
    uplink_bit_per_s: float | None = None,
    processor_s_per_byte: float = 0.0,
    workers_per_machine: int = 1,
    cores_per_worker: float | None = None,
) -> Cluster:
    return Cluster(
        processor_s_per_byte=processor_s_per_byte,
        workers_per_machine=workers_per_machine,
        cores_per_worker=cores_per_worker,
        hosts=tuple(hosts),
        latency_s=found.latency_s,
        hop_s=found.hop_s,
        uplink_bit_per_s=uplink_bit_per_s,
        copy_bytes_per_s=statistics.median(each.copy_bytes_per_s for each in speeds),
        select_numbers_per_s=statistics.median(each.select_numbers_per_s for each in speeds),
        spread=max(LEAST_SPREAD, found.spread),
        measured=f"{len(hosts)} hosts, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
    )
