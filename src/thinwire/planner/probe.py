"""One worker's view of the others over plain TCP: who can be reached, how fast, and how far clocks differ.

No torch: this runs before a process group, which would wait in silence for a host that cannot be reached.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from thinwire.hosts.machine import num_cores

CONNECT_S = 4.0
"""A host on the same network answers within milliseconds."""
PINGS = 20
WARM_S, TIMED_S = 0.1, 0.2
CHUNK = 1 << 16
_STAMP = struct.Struct("!d")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts that a worker tells the others before anything is measured."""

    rank: int
    name: str
    address: str
    """The address it reaches the first worker from, where others can reach it."""
    interface: str
    port: int
    machine: str
    """Identity of the machine, the same for workers that share a kernel."""
    python: str
    torch: str
    thinwire: str
    cores: int = 1
    """Cores that its worker may use."""
    site: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPath:
    """The path between two workers."""

    ranks: tuple[int, int]
    latency_s: float
    """Half of a round trip."""
    bit_per_s: float
    """Rate of the slower direction, with both in use at once; the median of several tries."""
    skew_s: float
    """The clock of the second minus that of the first."""
    best_bit_per_s: float
    """Rate of the best try: other programs can only make a path slower."""

    @staticmethod
    def of(tries: Sequence[HostPath]) -> HostPath:
        """Combine several tries on one path."""
        quickest = min(tries, key=lambda path: path.latency_s)  # it says most about latency and clocks
        rates = [path.bit_per_s for path in tries]
        return replace(quickest, bit_per_s=median(rates), best_bit_per_s=max(rates))


def facts(rank: int, master: tuple[str, int], port: int) -> HostFacts:
    """This worker's facts, among them the address where it can be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # sends nothing: the kernel only picks a route
        address = probe.getsockname()[0]
    return HostFacts(
        rank=rank,
        name=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        port=port,
        machine=_boot_id(),
        python=platform.python_version(),
        torch=_version("torch"),
        thinwire=_version("thinwire"),
        cores=num_cores(),
        site=os.environ.get("THINWIRE_SITE", ""),
    )


def interface_of(address: str) -> str:
    """The name of the interface with this address; "?" where the system does not tell.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    import fcntl  # here, because Windows has none

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "?"


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def rounds(world_size: int) -> Iterator[dict[int, int]]:
    """All pairs, in rounds in which everybody meets at most one other.

    >>> [sorted({tuple(sorted(pair)) for pair in round_.items()}) for round_ in rounds(4)]
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(world_size), *([-1] if world_size % 2 else [])]
    fixed, others = places[0], places[1:]
    for _ in range(len(places) - 1):
        line = [fixed, *others]
        pairs = list(zip(line[: len(line) // 2], reversed(line[len(line) // 2 :]), strict=True))
        met = {a: b for a, b in pairs if -1 not in (a, b)}
        yield met | {b: a for a, b in met.items()}
        others = [others[-1], *others[:-1]]


class Listener:
    """A socket that other workers connect to."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]

    def meet(self, own: HostFacts, peer: HostFacts) -> HostPath | str:
        """Measure the path to a peer that does the same at the same time; a string says what is wrong."""
        first = own.rank < peer.rank
        try:
            if first:
                self._server.settimeout(CONNECT_S)
                connection, _ = self._server.accept()
            else:
                connection = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
        except TimeoutError:
            return f"{peer.name} (rank {peer.rank}) did not answer {own.name} within {CONNECT_S:g} s"
        except OSError as error:
            return f"{own.name} cannot connect to {peer.name} at {peer.address}: {error.strerror}"
        with connection:
            connection.settimeout(4 * CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                latency_s, skew_s = _ping(connection) if first else _pong(connection)
                bit_per_s = _transfer(connection)
            except (TimeoutError, OSError, ConnectionError) as error:
                return f"the path from {own.name} to {peer.name} broke while it was measured: {error}"
        ranks = (own.rank, peer.rank) if first else (peer.rank, own.rank)
        rates = {"bit_per_s": bit_per_s, "best_bit_per_s": bit_per_s}
        return HostPath(ranks=ranks, latency_s=latency_s, skew_s=skew_s, **rates)

    def close(self) -> None:
        self._server.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the other side has gone")
    return data


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Round trips; the quickest says most about the clocks."""
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        sent_s = time.time()
        connection.sendall(_STAMP.pack(sent_s))
        theirs_s = _STAMP.unpack(_receive(connection, _STAMP.size))[0]
        here_s = time.time()
        best = min(best, (here_s - sent_s, theirs_s - (sent_s + here_s) / 2))
    connection.sendall(_STAMP.pack(best[0]))
    return best[0] / 2, best[1]


def _pong(connection: socket.socket) -> tuple[float, float]:
    for _ in range(PINGS):
        _receive(connection, _STAMP.size)
        connection.sendall(_STAMP.pack(time.time()))
    return _STAMP.unpack(_receive(connection, _STAMP.size))[0] / 2, 0.0


def _transfer(connection: socket.socket) -> float:
    """Bits per second that come in while as many go out."""
    stop_s = time.perf_counter() + WARM_S + TIMED_S
    sender = threading.Thread(target=_send_until, args=(connection, stop_s))
    sender.start()
    since_s, counted = 0.0, 0
    begin_s = time.perf_counter() + WARM_S
    last_s = begin_s
    while True:
        data = connection.recv(CHUNK)
        now_s = time.perf_counter()
        if not data:
            break
        if now_s < begin_s:
            since_s, counted = now_s, 0
        else:
            counted += len(data)
            last_s = now_s
    sender.join()
    return 8 * counted / max(last_s - max(since_s, begin_s), 1e-6)


def _send_until(connection: socket.socket, stop_s: float) -> None:
    data = bytes(CHUNK)
    with suppress(OSError):
        while time.perf_counter() < stop_s:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def quickest(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the shortest of the calls made in about `seconds`: others may use the processor too."""
    best_s, until_s = float("inf"), time.perf_counter() + seconds
    while (begin_s := time.perf_counter()) < until_s:
        work()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s
