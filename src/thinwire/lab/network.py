"""The lab's network: namespaces as hosts, bridges, and paths shaped with ip and tc; no torch.

Every host has one interface, eth0, whose other end is a port of its site's bridge. A token bucket on eth0
shapes the traffic it sends, one on the port the traffic it receives. Each site is connected to a core bridge
by an uplink, shaped the same way at both ends. Hosts are unnamed network namespaces: only open files refer to
them, so none is left behind.

Hosts know each other's hardware addresses from the start: those that the kernel would ask for fill a table
which all namespaces of a machine share. Of its usual 1,024 entries, 33 hosts that all talk need more.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.hosts.description import Description, Host
from thinwire.hosts.quantities import check_rate

INTERFACE = "eth0"
QUEUE_S = 0.1
"""Depth of the queue in front of a path, in seconds, as is common in routers."""
MAX_QUEUE_BYTES = 4_000_000
"""Largest queue: fast paths end at switches, which have no larger buffers."""
BURST_S = 0.003
"""Length of the burst that an idle path lets through at full speed."""
PACKET_BYTES = 1514

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_REPLACE_HOSTS = """
mount -t tmpfs none /mnt
cat > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """Traffic of one interface, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class ShapedNetwork:
    """The lab's network, created on construction; it lasts as long as the process that created it."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.namespaces: list[int] = []
        for _ in description.hosts:
            with _inside_network(None):
                self.namespaces.append(_open_network())
        self._rates = [host.rate_bit_per_s for host in description.hosts]
        self._segment_bytes = 0
        _use_common_congestion_control()
        _run("ip", self._bridges())
        for host in description.hosts:
            with _inside_network(self.namespaces[host.index]):
                _use_common_congestion_control()
                address = f"addr add {host.address}/16 dev {INTERFACE}"
                lines = ["link set lo up", address, f"link set {INTERFACE} addrgenmode none up"]
                _run("ip", [*lines, *(_neighbour(other) for other in description.hosts if other is not host)])
        if (uplink := description.uplink_bit_per_s) is not None:
            ends = [f"{end}{site}" for site in range(description.num_sites) for end in ("up", "down")]
            _run("tc", [_bucket(end, uplink) for end in ends])
        self._shape(range(len(self.namespaces)))
        _replace_hosts_file(description.hosts)

    def set_rate(self, bit_per_s: float, *, host: int | None = None) -> None:
        """Shape the path of one host (None: of all) in both directions, also during transfers."""
        check_rate(bit_per_s)
        chosen = range(len(self.namespaces)) if host is None else [host]
        for i in chosen:
            self._rates[i] = bit_per_s
        self._shape(chosen)

    def _shape(self, chosen: Sequence[int]) -> None:
        _run("tc", [_bucket(f"host{i}", self._rates[i]) for i in chosen])
        segment = segment_bytes(min([*self._rates, self.description.uplink_bit_per_s or self._rates[0]]))
        for i, namespace in enumerate(self.namespaces):
            with _inside_network(namespace):
                if i in chosen:
                    _run("tc", [_bucket(INTERFACE, self._rates[i])])
                if segment != self._segment_bytes:
                    # Connections read the new segment size only after their cached route is flushed.
                    _run("ip", [f"link set {INTERFACE} gso_max_size {segment}", "route flush cache"])
        self._segment_bytes = segment

    def set_path(self, *, host: int | None = None, site: int | None = None, up: bool) -> None:
        """Cut or heal the path of a host, or the uplink of a site. A cut path drops packets silently."""
        # The port leaves the bridge rather than going down: a host does not see a remote cable break.
        bridge, port = "core", f"down{site}"
        if host is not None:
            bridge, port = f"site{self.description.hosts[host].site}", f"host{host}"
        _run("ip", [f"link set {port} master {bridge}" if up else f"link set {port} nomaster"])

    def counters(self) -> list[Counters]:
        """Return the kernel's traffic counters of every host's port."""
        table = _interfaces()
        ports = (table[f"host{i}"] for i in range(len(self.namespaces)))
        return [Counters(p[0], p[8], p[1], p[9]) for p in ports]  # a port receives what the host sends

    def uplinks(self) -> list[Counters]:
        """Return the kernel's traffic counters of every site's uplink; none if there is one site."""
        sites, table = self.description.num_sites, _interfaces()
        ends = (table[f"down{site}"] for site in range(sites) if sites > 1)
        return [Counters(p[0], p[8], p[1], p[9]) for p in ends]  # the far end receives what the site sends

    def _bridges(self) -> list[str]:
        sites, several = range(self.description.num_sites), self.description.num_sites > 1
        lines = ["link set lo up"]
        for bridge in [f"site{site}" for site in sites] + ["core"] * several:
            lines.append(f"link add {bridge} type bridge forward_delay 0")
            lines.append(f"link set {bridge} addrgenmode none up")
        for site in sites if several else ():
            lines.append(f"link add up{site} type veth peer name down{site}")
            lines += [_plug(f"up{site}", f"site{site}"), _plug(f"down{site}", "core")]
        for host, namespace in zip(self.description.hosts, self.namespaces, strict=True):
            there = f"/proc/{os.readlink('/proc/self')}/fd/{namespace}"
            end = f"name {INTERFACE} address {_hardware_address(host)} netns {there}"
            lines.append(f"link add host{host.index} type veth peer {end}")
            lines.append(_plug(f"host{host.index}", f"site{host.site}"))
        return lines


def _plug(port: str, bridge: str) -> str:
    return f"link set {port} addrgenmode none master {bridge} up"


def _interfaces() -> dict[str, list[int]]:
    """Return the kernel's counters of every interface in this network namespace."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    pairs = (line.split(":") for line in lines)
    return {name.strip(): [int(number) for number in numbers.split()] for name, numbers in pairs}


def sent_by_this_host() -> int:
    """Return the bytes that this worker's host has sent, headers included; faster than `Control.counters`."""
    return _interfaces()[INTERFACE][8]


def _use_common_congestion_control() -> None:
    # This machine's default may be a rare one (bbr, say); nearly every machine uses cubic. Some do not let a
    # namespace choose it, and in networks as small as these reno behaves the same.
    for name in ("cubic", "reno"):
        with suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(name)
            return


def _hardware_address(host: Host) -> str:
    return f"02:00:00:00:{host.index >> 8:02x}:{host.index & 255:02x}"  # 02: assigned locally


def _neighbour(host: Host) -> str:
    address = f"{host.address} lladdr {_hardware_address(host)}"
    return f"neigh add {address} dev {INTERFACE} nud permanent"  # permanent ones are not counted in the table


def _bucket(device: str, bit_per_s: float) -> str:
    """Return the tc command for a token bucket with bursts of `BURST_S`."""
    byte_per_s = bit_per_s / 8
    burst = max(round(byte_per_s * BURST_S), 3 * segment_bytes(bit_per_s))
    queue = min(max(round(byte_per_s * QUEUE_S), 64 * PACKET_BYTES), MAX_QUEUE_BYTES)
    rate = f"rate {round(bit_per_s)}bit burst {burst} limit {queue + burst}"
    return f"qdisc replace dev {device} root tbf {rate}"


def segment_bytes(bit_per_s: float) -> int:
    """Return the size up to which the kernel may merge packets: 1 ms of the slowest path.

    The default of 64 kB exceeds the depth of a slow path's bucket, which then splits packets itself, at three
    times the processor time. Much smaller sizes cost processor time too.
    """
    return min(max(round(bit_per_s / 8 * 0.001), 4 * PACKET_BYTES), 65_536)


def _run(tool: str, lines: list[str]) -> None:
    done = run_tool([tool, "-batch", "-"], "\n".join(lines))
    if done.returncode != 0:
        raise UsageError(f"{tool} refused to create the lab's network: {done.stderr.strip()}")


def run_tool(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a system tool with `text` on its standard input, and capture its output."""
    return subprocess.run(
        command, input=text, text=True, capture_output=True, check=False, timeout=30, env=tool_environment()
    )


def tool_environment() -> dict[str, str]:
    """Return the environment with ip and tc on the PATH, which an ordinary user's often lacks."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"}


def _call(name: str, *arguments: int) -> None:
    # Python has os.unshare and os.setns from 3.12 on.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextmanager
def _inside_network(namespace: int | None) -> Iterator[None]:
    """Enter another network namespace (None: a new one) for a while, with the processes started meanwhile."""
    home = _open_network()
    try:
        if namespace is None:
            _call("unshare", _CLONE_NEWNET)
        else:
            _call("setns", namespace, _CLONE_NEWNET)
        yield
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


def _open_network() -> int:
    """Return an open file that refers to the network namespace of this thread, and keeps it alive."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_host(namespace: int, name: str) -> None:
    """Move this process into a host's network for good, and give it the host's name."""
    _call("setns", namespace, _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)


def _replace_hosts_file(hosts: Sequence[Host]) -> None:
    """Make names resolve to addresses through /etc/hosts inside the lab; the real file is not touched."""
    lines = ["127.0.0.1 localhost"]
    for host in hosts:
        # Sockets for both protocols look up IPv4 addresses as ::ffff:address.
        lines += [f"{host.address} {host.name}", f"::ffff:{host.address} {host.name}.lab"]
    run_tool(["sh", "-ec", _REPLACE_HOSTS], "\n".join(lines))  # without it, only lookups by name fail
