"""Bridges, paths and their shaping, made with ip and tc from inside the lab; no torch.

Every host has one interface, eth0, whose other end is a port of its site's bridge. A token bucket on
eth0 shapes what it sends, one on the port shapes what it receives. Sites hang on a core bridge, each by
an uplink shaped the same way at both ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.hosts.description import Description, Host
from thinwire.hosts.rates import check_rate
from thinwire.lab.namespaces import find_tool, inside_network, new_network

INTERFACE = "eth0"
PREFIX_BITS = 16
QUEUE_S = 0.1
"""Depth of the buffer in front of a path, as time: what routers are commonly given."""
DEEPEST_QUEUE_BYTES = 4_000_000
"""Fast paths end at switches, which hold no more than this."""
BURST_S = 0.003
PACKET_BYTES = 1514


@dataclass(frozen=True, slots=True)
class Counters:
    """What one host's interface has carried, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class Network:
    """The lab's network, made on construction; it lasts as long as the process that made it."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.namespaces = [new_network() for _ in description.hosts]
        self._rates = [host.rate_bit_per_s for host in description.hosts]
        self._uplink = description.uplink_bit_per_s
        self._segment_bytes = 0
        _use_common_congestion_control()
        _run("ip", self._bridges())
        for host in description.hosts:
            with inside_network(self.namespaces[host.index]):
                _use_common_congestion_control()
                _run("ip", _host_links(host))
        self._shape_hosts(range(len(self.namespaces)), verb="add")
        if self._uplink is not None:
            self._shape_uplinks(self._uplink, verb="add")

    def set_rate(self, bit_per_s: float, *, hosts: Iterable[int] | None = None) -> None:
        """Shape the paths of some hosts (all by default) in both directions, also while traffic runs."""
        check_rate(bit_per_s)
        chosen = list(range(len(self.namespaces)) if hosts is None else hosts)
        for i in chosen:
            self._rates[i] = bit_per_s
        self._shape_hosts(chosen, verb="change")

    def set_uplink(self, bit_per_s: float) -> None:
        """Shape the uplinks of all sites."""
        check_rate(bit_per_s, field="uplink")
        if self._uplink is None:
            raise UsageError("this lab has one site, and so no uplink")
        self._uplink = bit_per_s
        self._shape_uplinks(bit_per_s, verb="change")
        self._shape_hosts([], verb="change")

    def _shape_hosts(self, chosen: Iterable[int], *, verb: str) -> None:
        chosen = list(chosen)
        _run("tc", [_bucket(verb, _port(i), self._rates[i]) for i in chosen])
        slowest = min([*self._rates, self._uplink or self._rates[0]])
        segment = segment_bytes(slowest)
        for i, namespace in enumerate(self.namespaces):
            with inside_network(namespace):
                if i in chosen:
                    _run("tc", [_bucket(verb, INTERFACE, self._rates[i])])
                if segment != self._segment_bytes:
                    # Connections look the segment size up again only when their route is forgotten.
                    _run("ip", [f"link set {INTERFACE} gso_max_size {segment}", "route flush cache"])
        self._segment_bytes = segment

    def _shape_uplinks(self, bit_per_s: float, *, verb: str) -> None:
        sites = range(self.description.num_sites)
        _run("tc", [_bucket(verb, f"{end}{site}", bit_per_s) for site in sites for end in ("up", "down")])

    def set_path(self, *, host: int | None = None, site: int | None = None, up: bool) -> None:
        """Cut or heal the path of a host, or the uplink of a site. Packets are lost without a word."""
        # The port is taken off the bridge rather than put down: a host does not see a far cable break.
        if host is not None:
            bridge = f"site{self.description.hosts[host].site}"
            port = _port(host)
        else:
            bridge, port = "core", f"down{site}"
        _run("ip", [f"link set {port} master {bridge}" if up else f"link set {port} nomaster"])

    def counters(self) -> list[Counters]:
        """Per host what crossed its port: the interface's own count, in and out."""
        table = _interfaces()
        ports = (table[_port(i)] for i in range(len(self.namespaces)))
        # The port receives what the host sends.
        return [Counters(p[0], p[8], p[1], p[9]) for p in ports]

    def _bridges(self) -> list[str]:
        several = self.description.num_sites > 1
        lines = ["link set lo up"]
        if several:
            lines += _bridge("core")
        for site in range(self.description.num_sites):
            lines += _bridge(f"site{site}")
            if several:
                lines.append(f"link add up{site} type veth peer name down{site}")
                lines += _plug(f"up{site}", f"site{site}") + _plug(f"down{site}", "core")
        for host, namespace in zip(self.description.hosts, self.namespaces, strict=True):
            there = f"/proc/{os.readlink('/proc/self')}/fd/{namespace}"
            lines.append(f"link add {_port(host.index)} type veth peer name {INTERFACE} netns {there}")
            lines += _plug(_port(host.index), f"site{host.site}")
        return lines


def _interfaces() -> dict[str, list[int]]:
    """The kernel's counters of every interface in this network."""
    table: dict[str, list[int]] = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, numbers = line.split(":")
        table[name.strip()] = [int(number) for number in numbers.split()]
    return table


def sent_by_this_host() -> int:
    """Bytes that the host of this worker has sent so far, headers included; only inside a lab.

    Some 20 microseconds, where asking the lab for its counters is a conversation.
    """
    return _interfaces()[INTERFACE][8]


def _use_common_congestion_control() -> None:
    # This machine's default may be one that few have (bbr, say). Cubic is what nearly every machine has; some
    # do not let a namespace choose it, and in networks as small as these reno behaves the same.
    for name in ("cubic", "reno"):
        try:
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(name)
        except OSError:
            continue
        return


def _port(host: int) -> str:
    return f"host{host}"


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge forward_delay 0", f"link set {name} addrgenmode none up"]


def _plug(port: str, bridge: str) -> list[str]:
    return [f"link set {port} addrgenmode none master {bridge} up"]


def _host_links(host: Host) -> list[str]:
    return [
        "link set lo up",
        f"addr add {host.address}/{PREFIX_BITS} dev {INTERFACE}",
        f"link set {INTERFACE} addrgenmode none up",
    ]


def _bucket(verb: str, device: str, bit_per_s: float) -> str:
    """A token bucket; what it lets pass at once after a rest is `BURST_S` of the path."""
    byte_per_s = bit_per_s / 8
    burst = max(round(byte_per_s * BURST_S), 3 * segment_bytes(bit_per_s))
    queue = min(max(round(byte_per_s * QUEUE_S), 64 * PACKET_BYTES), DEEPEST_QUEUE_BYTES)
    return (
        f"qdisc {verb} dev {device} root tbf rate {round(bit_per_s)}bit burst {burst} limit {queue + burst}"
    )


def segment_bytes(bit_per_s: float) -> int:
    """How much the kernel may move as one packet: 1 ms of the slowest path.

    The usual 64 kB would be longer than the bucket is deep on slow paths, and a bucket cuts such packets
    up by itself, at three times the processor time. Much smaller ones cost processor time too.
    """
    return min(max(round(bit_per_s / 8 * 0.001), 4 * PACKET_BYTES), 65_536)


def _run(tool: str, lines: list[str]) -> None:
    done = subprocess.run(
        [find_tool(tool), "-batch", "-"],
        input="\n".join(lines),
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode != 0:
        raise UsageError(f"{tool} refused to make the lab's network: {done.stderr.strip()}")
