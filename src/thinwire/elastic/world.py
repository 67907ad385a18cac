"""An elastic world from one worker's point of view: how it starts or is joined, and its lane in every
generation.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from thinwire.elastic.journal import Journal
from thinwire.elastic.keys import KEY_BYTES, read_key
from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.peers import PeerConnections
from thinwire.elastic.store import PeerStore
from thinwire.errors import PeerDiffers, PeerError, PeerLate, PeerLost, SettingError, check
from thinwire.wire.backend import has_world, own_pools
from thinwire.wire.connect import connect_members
from thinwire.wire.control import open_door, own_address
from thinwire.wire.process_group import ProcessGroupLane
from thinwire.wire.tls.files import Contexts

_log = logging.getLogger("thinwire")
_starts = itertools.count()
"""Worlds that this process has started with others: where one store serves several, each has its own keys."""
_LEAVES_S = 0.5
"""For a joiner that has been refused, or gives up, to be gone before the others connect anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """Settings of a world whose workers may die, come back and join."""

    key_file: str = ""
    """The run's key, as `thinwire keys new FILE` makes it; needed to join later, and on public addresses. By
    default THINWIRE_KEY_FILE; without one, workers share a key of their own at the start."""
    join: Sequence[str] = ()
    """host:port of workers of a running world to join; by default those in THINWIRE_JOIN."""
    port: int = 0
    """Where this worker listens to the others; by default THINWIRE_PORT, or any free one."""
    allow_minority: bool = False
    """Go on also if most others cannot be reached. They may do the same: then there are two worlds, with two
    models, and they never merge."""
    allow_public: bool = False
    """Listen on a public address also without a key."""

    def __post_init__(self) -> None:
        check(0 <= self.port < 1 << 16, "Elastic.port", "from 0 to 65535", self.port)
        for address in self.addresses:
            _split(address)

    @property
    def addresses(self) -> list[str]:
        """Addresses of workers to join."""
        return list(self.join) or [each for each in os.environ.get("THINWIRE_JOIN", "").split(",") if each]

    @property
    def own_port(self) -> int:
        text = os.environ.get("THINWIRE_PORT", "") or "0"
        check(text.isdecimal() and int(text) < 1 << 16, "THINWIRE_PORT", "from 0 to 65535", text)
        return self.port or int(text)

    def read_key(self) -> bytes | None:
        path = self.key_file or os.environ.get("THINWIRE_KEY_FILE", "")
        return read_key(Path(path)) if path else None


class World:
    """One worker's place in an elastic world, generation after generation."""

    def __init__(
        self, settings: Elastic, *, timeout_s: float, silence_s: float, tls: Contexts | None = None
    ) -> None:
        """`tls`: what the payload travels by; None: Gloo."""
        self._settings, self._timeout_s, self._silence_s = settings, timeout_s, silence_s
        self.journal = Journal()
        self._tls = tls
        self.generation = 0
        """The newest one that was tried."""
        self.membership: Membership | None = None
        self._lane: ProcessGroupLane | None = None
        self._finishing = False
        self._store: PeerStore | None = None
        """Kept, as torch only keeps what is inside it."""
        key, addresses = settings.read_key(), [_split(each) for each in settings.addresses]
        if addresses:
            hint = "give the key file of the running world, in Elastic(key_file=...) or THINWIRE_KEY_FILE"
            if key is None:
                raise SettingError("joining a world needs its key", hint=hint)
            self._peers = self._open_door(_route_to(addresses), "j" + secrets.token_hex(2), key)
            self._peers.join(addresses)
        else:
            self._start(key)
        self._peers.on_change = self._end_lane
        self.journal.note(
            "member",
            id=self.me.id,
            host=self.me.host,
            port=self.me.port,
            pid=os.getpid(),
            rank=os.environ.get("RANK"),
        )

    @property
    def me(self) -> Member:
        return self._peers.me

    def connect(self) -> ProcessGroupLane:
        """The lane of the next membership whose workers could all be connected.

        PeerLate if that takes longer than `timeout_s`; for a worker that has not trained yet, when somebody
        cannot be connected.
        """
        began_s = time.monotonic()
        while True:
            joined = self.membership is None
            if joined and time.monotonic() > began_s + self._timeout_s:
                raise PeerLate(f"nobody has let this worker join for {self._timeout_s:g} s")
            found = self._peers.next_membership(self.generation, allow_minority=self._settings.allow_minority)
            self.generation = found.generation
            try:
                self._lane = self._form(found)
            except (PeerLost, PeerDiffers) as error:
                if isinstance(error, PeerDiffers):
                    self._blame_joiner(error)
                _log.info("generation %d did not come about: %s", found.generation, error.message)
                continue
            except PeerLate as error:
                # one that froze just now, or a new one behind a firewall: the next membership is without it
                if joined or time.monotonic() > began_s + self._timeout_s:
                    raise
                _log.warning("generation %d did not come about: %s", found.generation, error.message)
                time.sleep(_LEAVES_S)
                continue
            self.membership = found
            if self._moved_on(found.generation):  # before there was a lane to end
                self._lane.abort(PeerLost("the workers have changed"))
            return self._lane

    def _blame_joiner(self, error: PeerDiffers) -> None:
        """Nobody can connect to a worker with another certificate: whoever is new has it, and leaves."""
        if self.membership is None:
            raise error
        _log.warning("a worker that joins cannot be connected: %s", error.message)
        time.sleep(_LEAVES_S)

    @property
    def known_steps(self) -> list[int]:
        """Steps that each worker of this generation has last said to have done."""
        return [] if self._lane is None else self._lane.known_steps

    def drop(self, error: PeerError) -> None:
        """Give up the lane of this generation."""
        if self._lane is not None:
            lane, self._lane = self._lane, None
            lane.drop(error)

    def finish(self) -> None:
        """Training is over: from now on it does not matter who leaves."""
        self._finishing = True

    def close(self) -> None:
        """Give back the lane, or drop it if this worker leaves because of an error, and leave."""
        if self._lane is not None and self._lane.lost is not None:
            self.drop(PeerLost("this worker leaves"))
        elif self._lane is not None:
            self._lane.close()
            own_pools[:] = [each for each in own_pools if each.store is not self._store]
        self.leave()

    def leave(self) -> None:
        """Say good-bye; the others go on."""
        self._peers.leave()
        self.journal.close()

    def _form(self, found: Membership) -> ProcessGroupLane:
        """Wait until the training of all members has come here, then connect."""
        peers, generation = self._peers, found.generation
        store = PeerStore(peers, generation, found.lineage)
        peers.publish(generation, f"ready/{self.me.id}", b"1")
        ready = [f"ready/{id_}" for id_ in found.ids]
        if peers.published(generation, ready, self._timeout_s) is None:
            if not self._moved_on(generation):
                missing = [key[6:] for key in ready if peers.published(generation, [key], 0.0) is None]
                if missing:
                    raise PeerLate(f"waited {self._timeout_s:g} s for {', '.join(missing)} to go on")
            raise PeerLost(f"the members of generation {generation} have changed")
        self._store = store

        def lost() -> PeerLost | None:
            return PeerLost("the members have changed") if self._moved_on(generation) else None

        return connect_members(
            store,
            found.ids.index(self.me.id),
            len(found.ids),
            timeout_s=self._timeout_s,
            silence_s=self._silence_s,
            lost=lost,
            tls=self._tls,
        )

    def _moved_on(self, generation: int) -> bool:
        roster = self._peers.roster
        newest = roster.membership
        return newest is None or newest.generation != generation or roster.changing

    def _end_lane(self, membership: Membership) -> None:
        """Called when the members have changed: whoever waits on the lane of the last ones comes back."""
        lane = self._lane
        if lane is not None and not self._finishing and membership.generation != self.generation:
            before = self.membership
            joined = set(membership.ids) - set(before.ids if before is not None else ())
            what = f"{', '.join(sorted(joined))} joins" if joined else "the workers have changed"
            lane.abort(PeerLost(f"{what}: generation {membership.generation} follows"))

    # -- the start ------------------------------------------------------------------------------------

    def _start(self, key: bytes | None) -> None:
        """Meet the others through the store of the launcher, which nobody needs after that."""
        if dist.is_initialized():
            store, rank, world_size = _get_default_store(), dist.get_rank(), dist.get_world_size()
        elif has_world():
            store, rank, world_size = next(iter(rendezvous("env://")))
        else:
            self._start_alone(key)
            return
        within = timedelta(seconds=self._timeout_s)
        place = f"thinwire/elastic/{next(_starts)}"
        keys = [f"{place}/{other}" for other in range(world_size)]
        if rank == 0:
            common = [secrets.token_hex(4), "" if key is not None else secrets.token_hex(KEY_BYTES)]
            store.set(f"{place}/common", json.dumps(common))
        store.wait([f"{place}/common"], within)
        lineage, shared = json.loads(store.get(f"{place}/common"))
        if (key is None) != bool(shared):
            raise SettingError(
                "some workers have a key file and some have none", hint="give all the same one"
            )
        self._check_public(own_address(store), keyed=key is not None)
        self._peers = self._open_door(own_address(store), f"w{rank}", key or bytes.fromhex(shared))
        store.set(keys[rank], json.dumps(self.me.to_json()))
        self._wait_for_all(store, keys, within)
        members = tuple(Member.from_json(json.loads(store.get(each))) for each in keys)
        self._peers.start(Membership(1, members, lineage))
        self._first_store = store  # its host keeps it until the others have read from it, which `ready` says

    _first_store: Store | None = None

    def _wait_for_all(self, store: Store, keys: Sequence[str], within: timedelta) -> None:
        try:
            store.wait(list(keys), within)
        except RuntimeError as error:
            self._peers.stop()
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise PeerLate(f"workers {missing} have not attached in {self._timeout_s:g} s") from error

    def _start_alone(self, key: bytes | None) -> None:
        address = _route_to([("192.0.2.1", 9)]) if key is not None else "127.0.0.1"
        self._peers = self._open_door(address, "w0", key or secrets.token_bytes(KEY_BYTES))
        self._peers.start(Membership(1, (self.me,), secrets.token_hex(4)))

    def _check_public(self, address: str, *, keyed: bool) -> None:
        if ipaddress.ip_address(address).is_global and not keyed and not self._settings.allow_public:
            raise SettingError(
                f"this worker would listen on the public address {address} without a key",
                hint="make one with `thinwire keys new FILE` and give it to all workers in "
                "Elastic(key_file=...); or, behind a firewall, say Elastic(allow_public=True)",
            )

    def _open_door(self, address: str, name: str, key: bytes) -> PeerConnections:
        try:
            door = open_door(address, self._settings.own_port, backlog=128)
        except OSError as error:
            asked = self._settings.own_port
            raise SettingError(f"Elastic.port must be free on {address}, got {asked} ({error})") from error
        me = Member(f"{name}@{socket.gethostname()[:32]}/{os.getpid()}", address, door.getsockname()[1])
        _log.info("%s listens on %s port %d", me.id, me.host, me.port)
        return PeerConnections(door, me, key, silence_s=self._silence_s, journal=self.journal)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    check(bool(host) and port.isdecimal(), "join", "host:port", address)
    return host.strip("[]"), int(port)


def _route_to(addresses: Sequence[tuple[str, int]]) -> str:
    """The address by which this host reaches the first of some others whose name is known."""
    for address in addresses:
        with contextlib.suppress(OSError):
            family, *_, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"
