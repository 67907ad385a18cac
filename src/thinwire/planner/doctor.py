"""Measures the hosts it runs on, all at once, and says which path and which worker is slow.

Runs as one worker on every host, started by torchrun or by the lab. First plain sockets find out who can be
reached: a process group would wait in silence. Then every pair is measured, then all at once over Gloo while
every worker computes, as in a training.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from thinwire.compress.select import prepare, select_
from thinwire.compress.sparse import SparseLayout, new_message
from thinwire.errors import DataError, PeerLost, UsageError
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.findings import SLOW, findings
from thinwire.planner.probe import HostFacts, HostPath, Listener, facts, quickest, rounds

MEET_S = 12.0
"""All workers must have come within this."""
SMALL, LARGE_S, TRIES = 8, 0.25, 5
"""Numbers in a message that only shows latency; seconds that a transfer should take; tries of each."""
SPEED_S = 0.3
"""Of each measurement of a worker alone."""
COPIED, SELECTED = 1 << 22, 1 << 22
"""Numbers that are copied, and selected from."""
LEAST_SPREAD = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What one worker does in a second by itself."""

    steps_per_s: float
    """Of a small reference training."""
    copy_bytes_per_s: float
    select_numbers_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What all workers have found, the same on each of them."""

    cluster: Cluster
    hosts: tuple[HostFacts, ...]
    paths: tuple[HostPath, ...]
    speeds: tuple[Speeds, ...]
    idle_bit_per_s: float
    """Of the slowest host while all send and nobody computes."""
    busy_bit_per_s: float
    """The same while everybody computes."""
    findings: tuple[str, ...]
    """What is wrong or slow, one sentence each."""

    def found(self) -> dict[str, Any]:
        """For the cluster file."""
        return {
            "hosts": [asdict(each) for each in self.hosts],
            "paths": [asdict(each) for each in self.paths],
            "speeds": [asdict(each) for each in self.speeds],
            "idle_bit_per_s": self.idle_bit_per_s,
            "busy_bit_per_s": self.busy_bit_per_s,
            "findings": list(self.findings),
        }


def examine(*, told: Callable[[str], object] = lambda words: None) -> Diagnosis:
    """Measure all hosts; called once by every worker, with torchrun's environment."""
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the doctor runs as one worker per host, and {error} is not set to what torchrun sets",
            hint="torchrun --nnodes N --node-rank I --master-addr A --nproc-per-node 1 -m thinwire doctor",
        ) from None
    store = _meet(rank, world_size, master)
    listener = Listener()
    try:
        own = facts(rank, master, listener.port)
        hosts = [HostFacts(**each) for each in _exchange(store, "facts", own.as_dict(), rank, world_size)]
        told(f"{world_size} workers have come; measuring every pair ...")
        paths = _measure_paths(store, listener, own, hosts)
    finally:
        listener.close()
    with suppress(RuntimeError, ValueError):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
        )
    told("measuring all at once, idle and while computing ...")
    try:
        return _diagnose(hosts, paths, _speeds(hosts))
    finally:
        dist.destroy_process_group()


# -- meeting --------------------------------------------------------------------------------------------


def _meet(rank: int, world_size: int, master: tuple[str, int]) -> TCPStore:
    """Connect to the first worker's store, and wait until all have."""
    where = f"{master[0]}:{master[1]}"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store itself
    try:
        if rank > 0:
            _connect(master)
        store = TCPStore(
            *master,
            None,
            rank == 0 and not agent,
            timeout=datetime.timedelta(seconds=MEET_S),
            wait_for_workers=False,
        )
    except (OSError, dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        name = socket.gethostname()
        raise PeerLost(
            f"{name} (rank {rank}) cannot reach the first worker at {where} within {MEET_S:g} s",
            rank=rank,
            host=name,
            hint="is that address the first host's own, on the network all share, and is the port open? "
            f"try `nc -vz {master[0]} {master[1]}` here ({str(error).splitlines()[0][:80]})",
        ) from None
    store.set(f"doctor/came/{rank}", "1")
    deadline_s, missing = time.monotonic() + MEET_S, list(range(world_size))
    while missing and time.monotonic() < deadline_s:
        missing = [each for each in missing if not store.check([f"doctor/came/{each}"])]
        time.sleep(0.05)
    if missing:
        ranks = ", ".join(map(str, missing))
        raise PeerLost(
            f"of {world_size} workers, rank {ranks} did not reach {where} within {MEET_S:g} s",
            rank=missing[0],
            hint="is it started there, with the same --master-addr and --master-port? "
            "its own output says what it could not reach",
        )
    return store


def _connect(master: tuple[str, int]) -> None:
    """Try until the first worker listens: torch's own client would fill the screen if it never does."""
    deadline_s = time.monotonic() + MEET_S
    while True:
        try:
            socket.create_connection(master, timeout=max(0.1, deadline_s - time.monotonic())).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def _exchange(store: TCPStore, what: str, value: Any, rank: int, world_size: int) -> list[Any]:
    """Everybody's value, in order of rank."""
    store.set(f"doctor/{what}/{rank}", json.dumps(value))
    try:
        return [json.loads(store.get(f"doctor/{what}/{each}")) for each in range(world_size)]
    except (dist.DistStoreError, RuntimeError):
        missing = [each for each in range(world_size) if not store.check([f"doctor/{what}/{each}"])]
        raise PeerLost(f"rank {', '.join(map(str, missing))} is gone since the start") from None


def _measure_paths(
    store: TCPStore, listener: Listener, own: HostFacts, hosts: Sequence[HostFacts]
) -> tuple[HostPath, ...]:
    """Every pair, some of them at a time; raises if two cannot reach each other."""
    found, wrong = list[HostPath](), list[str]()
    for number, meetings in enumerate(rounds(len(hosts))):
        if own.rank in meetings:
            result = listener.meet(own, hosts[meetings[own.rank]])
            if isinstance(result, str):
                wrong.append(result)
            elif result.ranks[0] == own.rank:
                found.append(result)
        said = _exchange(store, f"wrong/{number}", wrong, own.rank, len(hosts))
        if any(said):
            raise PeerLost(
                "; ".join(dict.fromkeys(words for each in said for words in each)),
                hint="hosts must reach each other on all ports, or on those of "
                "/proc/sys/net/ipv4/ip_local_port_range: look at firewalls, and at GLOO_SOCKET_IFNAME",
            )
    all_found = _exchange(store, "paths", [asdict(path) for path in found], own.rank, len(hosts))
    paths = [HostPath(**{**path, "ranks": tuple(path["ranks"])}) for each in all_found for path in each]
    return tuple(sorted(paths, key=lambda path: path.ranks))


# -- one worker alone -----------------------------------------------------------------------------------


def _speeds(hosts: Sequence[HostFacts]) -> list[Speeds]:
    """Of every worker; those that share a machine take turns."""
    rank = dist.get_rank()
    same = [host.rank for host in hosts if host.machine == hosts[rank].machine]
    turns = max(sum(other.machine == host.machine for other in hosts) for host in hosts)
    own = Speeds(steps_per_s=0, copy_bytes_per_s=0, select_numbers_per_s=0)
    for turn in range(turns):
        if turn == same.index(rank):
            own = _own_speeds()
        dist.barrier()
    gathered: list[Any] = [None] * len(hosts)
    dist.all_gather_object(gathered, asdict(own))
    return [Speeds(**each) for each in gathered]


def _own_speeds() -> Speeds:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(64, 256)

    def step() -> None:  # through an optimizer, as trainings do
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

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
def _computing() -> Iterator[None]:
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
class _AtOnce:
    hop_s: float
    latency_s: float
    bit_per_s: float
    spread: float


def _at_once(slowest_bit_per_s: float) -> _AtOnce:
    """All workers in one ring, and every worker with its neighbours."""
    world_size = dist.get_world_size()
    few, into = torch.ones(SMALL), torch.empty(SMALL)
    hops, share = 2 * (world_size - 1), 2 * (world_size - 1) / world_size
    _ring_s(few, 1)
    _neighbours(few, into)
    hop_s, _ = _median_s(lambda: _ring_s(few, 1), 4 * TRIES)
    latency_s, _ = _median_s(lambda: _neighbours(few, into), 4 * TRIES)
    parts = 4
    count = max(parts, int(LARGE_S * slowest_bit_per_s / 8 / share / 4) // parts * parts)
    numbers = torch.ones(count)
    whole_s, spread = _median_s(lambda: _ring_s(numbers, parts), TRIES)
    # The parts are under way together: the hops of one hide behind the bytes of the others.
    sending_s = max(whole_s - hop_s, 1e-6)
    return _AtOnce(
        hop_s=hop_s / hops,
        latency_s=latency_s,
        bit_per_s=8 * share * numbers.nbytes / sending_s,
        spread=spread,
    )


def _diagnose(hosts: Sequence[HostFacts], paths: Sequence[HostPath], speeds: Sequence[Speeds]) -> Diagnosis:
    if len(hosts) == 1:
        raise UsageError("there is nobody to measure a path to", hint="start it on two hosts or more")
    rates = {
        host.rank: statistics.median(path.bit_per_s for path in paths if host.rank in path.ranks)
        for host in hosts
    }
    idle = _at_once(min(rates.values()))
    # Workers of one machine in the lab emulate accelerators: there, computing takes no processor.
    shared = len({host.machine for host in hosts}) < len(hosts)
    if shared:
        busy = idle
    else:
        with _computing():
            busy = _at_once(min(rates.values()))
    factor = min(1.0, busy.bit_per_s / min(rates.values()))
    fastest = max(each.steps_per_s for each in speeds)
    relative = [each.steps_per_s / fastest for each in speeds]
    sites = {site: place for place, site in enumerate(dict.fromkeys(host.site for host in hosts))}
    cluster = Cluster(
        hosts=tuple(
            ClusterHost(
                name=host.name,
                rate_bit_per_s=min(max(rates[host.rank] * factor, 8_000.0), 100e9),
                speed=relative[host.rank] if relative[host.rank] < SLOW else 1.0,
                site=sites[host.site],
            )
            for host in hosts
        ),
        latency_s=busy.latency_s,
        hop_s=busy.hop_s,
        uplink_bit_per_s=_uplink(hosts, paths) if len(sites) > 1 else None,
        copy_bytes_per_s=statistics.median(each.copy_bytes_per_s for each in speeds),
        select_numbers_per_s=statistics.median(each.select_numbers_per_s for each in speeds),
        spread=max(LEAST_SPREAD, busy.spread),
        measured=f"{len(hosts)} hosts, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
    )
    return Diagnosis(
        cluster=cluster,
        hosts=tuple(hosts),
        paths=tuple(paths),
        speeds=tuple(speeds),
        idle_bit_per_s=idle.bit_per_s,
        busy_bit_per_s=busy.bit_per_s,
        findings=tuple(findings(hosts, paths, rates, relative, idle.bit_per_s, busy.bit_per_s)),
    )


def _uplink(hosts: Sequence[HostFacts], paths: Sequence[HostPath]) -> float:
    """What a path between sites carries."""
    between = [p.bit_per_s for p in paths if hosts[p.ranks[0]].site != hosts[p.ranks[1]].site]
    return statistics.median(between)


def check_writable(path: Path) -> None:
    """Refuse a cluster file that cannot be written before anything is measured."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError(f"{path} cannot be written: {folder} is no folder that can be written to")
