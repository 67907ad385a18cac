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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from thinwire.errors import PeerLost, UsageError
from thinwire.hosts.quantities import HIGHEST_BIT_PER_S, LOWEST_BIT_PER_S
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.findings import SLOW, findings
from thinwire.planner.probe import HostFacts, HostPath, Listener, facts, rounds
from thinwire.planner.speeds import (
    Speeds,
    at_once,
    cluster_from,
    computing,
    gather_speeds,
    processor_s_per_byte,
)

MEET_S = 12.0
"""Time within which all workers must have come."""
TRIES = 3
"""Measurements of every path, and of every worker's speed."""
STORE_S = 4.0
"""A store that can be reached answers within this; another program that has the port never does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Measurements and findings of all workers, the same on each of them."""

    cluster: Cluster
    hosts: tuple[HostFacts, ...]
    paths: tuple[HostPath, ...]
    speeds: tuple[Speeds, ...]
    idle_bit_per_s: float
    """Rate of the slowest host while all send and nobody computes."""
    busy_bit_per_s: float
    """Rate of the slowest host while all send and compute."""
    findings: tuple[str, ...]
    """Faults and slow parts, one sentence each."""

    def found(self) -> dict[str, Any]:
        """The measurements as the cluster file has them."""
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
            hint="on every host: thinwire doctor --hosts N --rank I --first ADDRESS, or "
            "torchrun --nnodes N --node-rank I --master-addr A --nproc-per-node 1 -m thinwire doctor",
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
        store = _open_store(master, serves=rank == 0 and not agent)
        store.set(f"doctor/came/{rank}", "1")
    except (OSError, dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        name = socket.gethostname()
        raise PeerLost(
            f"{name} (rank {rank}) cannot reach the first worker at {where}",
            rank=rank,
            host=name,
            hint="is that address the first host's own, on the network all share, and is the port open? "
            f"try `nc -vz {master[0]} {master[1]}` here ({str(error).splitlines()[0][:80]})",
        ) from None
    deadline_s, missing = time.monotonic() + MEET_S, list(range(world_size))
    with suppress(RuntimeError):  # the first worker has waited long enough, and closed its store
        while missing and time.monotonic() < deadline_s:
            missing = [each for each in missing if not store.check([f"doctor/came/{each}"])]
            time.sleep(0.05)
    if missing:
        ranks = ", ".join(map(str, missing))
        raise PeerLost(
            f"of {world_size} workers, rank {ranks} did not reach {where} within {MEET_S:g} s",
            rank=missing[0],
            hint="is it started there, with the same --first, or --master-addr and --master-port? "
            "its own output says what it could not reach",
        )
    return store


def _open_store(master: tuple[str, int], *, serves: bool) -> TCPStore:
    """The store, opened in a thread: torch waits for ever where a program that is no store has the port."""
    opened = Future[TCPStore]()

    def work() -> None:
        limit = datetime.timedelta(seconds=STORE_S)
        try:
            store = TCPStore(*master, None, serves, timeout=limit, wait_for_workers=False)
            store.set_timeout(datetime.timedelta(seconds=MEET_S))
            opened.set_result(store)
        except (OSError, RuntimeError) as error:
            opened.set_exception(error)

    threading.Thread(target=work, name="thinwire-store", daemon=True).start()
    try:
        return opened.result(MEET_S)
    except TimeoutError:
        raise RuntimeError("whatever listens there does not answer as a store does") from None


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
    """Every pair several times, some of them at a time; raises if two cannot reach each other."""
    found, wrong = defaultdict[tuple[int, int], list[HostPath]](list), list[str]()
    # one try after the other, so that what disturbs one does not disturb all
    for number, meetings in enumerate(list(rounds(len(hosts))) * TRIES):
        if own.rank in meetings:
            result = listener.meet(own, hosts[meetings[own.rank]])
            if isinstance(result, str):
                wrong.append(result)
            elif result.ranks[0] == own.rank:
                found[result.ranks].append(result)
        said = _exchange(store, f"wrong/{number}", wrong, own.rank, len(hosts))
        if any(said):
            raise PeerLost(
                "; ".join(dict.fromkeys(words for each in said for words in each)),
                hint="hosts must reach each other on all ports, or on those of "
                "/proc/sys/net/ipv4/ip_local_port_range: look at firewalls, and at GLOO_SOCKET_IFNAME",
            )
    whole = [asdict(HostPath.of(tries)) for tries in found.values()]
    all_found = _exchange(store, "paths", whole, own.rank, len(hosts))
    paths = [HostPath(**{**path, "ranks": tuple(path["ranks"])}) for each in all_found for path in each]
    return tuple(sorted(paths, key=lambda path: path.ranks))


def _speeds(hosts: Sequence[HostFacts]) -> list[Speeds]:
    """Speeds of all workers; those that share a machine take turns."""
    machine = hosts[dist.get_rank()].machine
    turns = max(sum(other.machine == host.machine for other in hosts) for host in hosts)
    same = [host.machine == machine for host in hosts]
    tries = [gather_speeds(same, turns) for _ in range(TRIES)]
    return [Speeds.best(each) for each in zip(*tries, strict=True)]


def _diagnose(hosts: Sequence[HostFacts], paths: Sequence[HostPath], speeds: Sequence[Speeds]) -> Diagnosis:
    if len(hosts) == 1:
        raise UsageError("there is nobody to measure a path to", hint="start it on two hosts or more")
    rates = {
        host.rank: statistics.median(path.bit_per_s for path in paths if host.rank in path.ranks)
        for host in hosts
    }
    slowest = min(rates.values())
    idle = busy = at_once(slowest)
    # Workers of one machine in the lab emulate accelerators: there, computing takes no processor.
    if len({host.machine for host in hosts}) == len(hosts):
        with computing():
            busy = at_once(slowest)
    factor = min(1.0, busy.bit_per_s / slowest)
    relative = [each.steps_per_s / max(other.steps_per_s for other in speeds) for each in speeds]
    sites = {site: place for place, site in enumerate(dict.fromkeys(host.site for host in hosts))}
    kept = [
        ClusterHost(
            name=host.name,
            rate_bit_per_s=min(max(rates[host.rank] * factor, LOWEST_BIT_PER_S), HIGHEST_BIT_PER_S),
            speed=relative[host.rank] if relative[host.rank] < SLOW else 1.0,
            site=sites[host.site],
        )
        for host in hosts
    ]
    uplink = _uplink(hosts, paths) if len(sites) > 1 else None
    on_machine = Counter(host.machine for host in hosts)
    return Diagnosis(
        cluster=cluster_from(
            kept,
            busy,
            speeds,
            uplink_bit_per_s=uplink,
            processor_s_per_byte=processor_s_per_byte(slowest),
            workers_per_machine=max(on_machine.values()),
            cores_per_worker=min(host.cores / on_machine[host.machine] for host in hosts),
        ),
        hosts=tuple(hosts),
        paths=tuple(paths),
        speeds=tuple(speeds),
        idle_bit_per_s=idle.bit_per_s,
        busy_bit_per_s=busy.bit_per_s,
        findings=tuple(findings(hosts, paths, relative, idle.bit_per_s, busy.bit_per_s)),
    )


def _uplink(hosts: Sequence[HostFacts], paths: Sequence[HostPath]) -> float:
    """Rate of a path between sites, the median."""
    between = [p.bit_per_s for p in paths if hosts[p.ranks[0]].site != hosts[p.ranks[1]].site]
    return statistics.median(between)
