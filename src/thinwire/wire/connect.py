"""How the workers of a process group, or of a store of their own, come to a lane, or learn who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.errors import PeerDiffers, PeerError, PeerLate, PeerLost
from thinwire.wire.backend import Pool, Source, has_world, own_pools, pool, start_world
from thinwire.wire.presence import Presence
from thinwire.wire.process_group import ProcessGroupLane
from thinwire.wire.tls.backend import TlsSource
from thinwire.wire.tls.files import Contexts
from thinwire.wire.waiters import Waiters
from thinwire.wire.watch import Watch

_MEET_S = 12.0
"""Time to connect to each other for workers who are all there; one that dies just then is not noticed."""
_LOOK_S = 0.05
_NOTICE_S = 1.0
T = TypeVar("T")


def connect(
    process_group: dist.ProcessGroup | None, timeout_s: float, silence_s: float, tls: Contexts | None = None
) -> ProcessGroupLane | None:
    """The lane over `process_group` (None: the default group, which is started if nobody has yet and a
    launcher has set up a world); None where there is no world to connect to. `tls`: what the payload travels
    by; None: the backends of torch."""
    if process_group is None and not dist.is_initialized():
        if not has_world():
            return None
        start_world()
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    ranks = dist.get_process_group_ranks(base)
    name = pool.use(ranks)
    presence, watches = Presence(base, f"thinwire/{name}", timeout_s), list[Watch]()

    def meet() -> ProcessGroupLane:
        client = pool.watch_client = pool.watch_client or pool.new_client()
        presence.join()
        if presence.lost is not None:
            raise presence.lost
        rank = ranks.index(dist.get_rank())
        within_s = _MEET_S if presence.complete else max(1.0, presence.left_s)  # or: see who is late
        try:
            watch = Watch(client, name, rank, ranks, within_s, silence_s)
        except PeerLate as error:
            absent = error.rank or 0
            if (dead := presence.first_dead(absent)) != absent:
                raise presence.loss(dead, str(error)) from error
            raise
        watches.append(watch)
        source: Source = pool
        if tls is not None:
            source = TlsSource(PrefixStore(name, client), dist.get_rank(), ranks, tls, within_s)
            own_pools.append(source)
        return _connected_lane(ranks, watch, timeout_s, source)

    return _within(timeout_s + 10, meet, lambda: watches[0].lost if watches else presence.lost)


def connect_members(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    silence_s: float,
    lost: Callable[[], PeerError | None],
    tls: Contexts | None = None,
) -> ProcessGroupLane:
    """The lane between workers that a store of their own joins, all of whom are there now; the error `lost`,
    should there be one before they are connected."""
    ranks, watches, given_up = list(range(world_size)), list[Watch](), threading.Event()
    own: Source = Pool(store=store, rank=rank)
    if tls is not None:
        own = TlsSource(store, rank, ranks, tls, _MEET_S)
    own_pools.append(own)

    def meet() -> ProcessGroupLane:
        watch = Watch(store, "members", rank, ranks, _MEET_S, silence_s)
        watches.append(watch)
        if given_up.is_set():  # while it was being made: nobody else will stop it
            watch.stop()
            raise PeerLost("this worker has given up")
        return _connected_lane(ranks, watch, timeout_s, own)

    try:
        return _within(_MEET_S + 10, meet, lambda: lost() or (watches[0].lost if watches else None))
    except BaseException:
        given_up.set()
        own.abort()
        own_pools.remove(own)
        for watch in watches:
            watch.stop()
        raise


def _connected_lane(ranks: Sequence[int], watch: Watch, timeout_s: float, source: Source) -> ProcessGroupLane:
    lane = ProcessGroupLane(ranks, "strategy", watch, timeout_s, source)
    try:
        lane.connect()
    except RuntimeError as error:
        raise watch.explain(error) from error
    except PeerError as error:  # it knows who is behind it, and the others do not
        raise watch.ring(error) from error
    return lane


def _within(timeout_s: float, call: Callable[[], T], lost: Callable[[], PeerError | None]) -> T:
    """The result of a call that may never return, since a client of the store waits for ever for a host that
    is cut off; or the error `lost`, should there be one before."""
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
        ended.set()

    waiters = Waiters("thinwire-connect", limit=1)
    waiters.submit(run)
    waiters.stop(deadline=time.monotonic())  # the thread ends with the call, also with one that is given up
    deadline, cause = time.monotonic() + timeout_s, lost()
    while cause is None and not ended.wait(_LOOK_S) and time.monotonic() < deadline:
        cause = lost()
    told_by = time.monotonic() + _NOTICE_S  # a death breaks several connections, one after another
    while errors and cause is None and time.monotonic() < told_by:
        time.sleep(_LOOK_S)
        cause = lost()
    if results:
        return results[0]
    if errors and isinstance(errors[0], PeerDiffers):  # that others leave because of it says less
        raise errors[0]
    if cause is not None:
        raise cause from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    raise PeerLost(
        f"the store that joins the workers has not answered for {timeout_s:g} s",
        hint="is the host of MASTER_ADDR up, and can it be reached from here?",
    )
