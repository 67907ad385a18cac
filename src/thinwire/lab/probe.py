"""The worker behind `thinwire lab check`: times transfers of a known size and reports them.

Runs in a lab as `-m thinwire.lab.probe BYTES REPEATS`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.lab.control import Control

PORT = 29600


def main() -> None:
    num_bytes, repeats = int(sys.argv[1]), int(sys.argv[2])
    control = Control.of_this_worker()
    if control is None:
        raise UsageError("this is a part of the lab", hint="run `thinwire lab check`")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values, inbox = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    peer = rank ^ 1
    found: dict[str, object] = {}
    if rank == 0:
        control.restart_load()
    with _Pair(rank, peer if peer < world_size else None) as raw:
        found["exchange, TCP"] = _best_s(lambda: _exchange_raw(raw, num_bytes), repeats)
    found["exchange, Gloo"] = _best_s(lambda: _exchange(values, inbox, peer, world_size), repeats)
    _best_s(lambda: dist.all_reduce(inbox[:1]), 1)  # connect the ring
    before = _sent_bytes(control, rank)
    found["all-reduce, Gloo"] = _best_s(lambda: dist.all_reduce(values), repeats)
    handed_over = 2 * (world_size - 1) / world_size * num_bytes * repeats
    found["counted"] = (_sent_bytes(control, rank) - before) / handed_over
    if rank == 0:
        share, warning = control.load()
        found["busy"], found["warnings"] = share, [warning] if warning else []
        control.report(found)
    dist.barrier()
    dist.destroy_process_group()
    control.close()


def _best_s(transfer: Callable[[], object], repeats: int) -> float:
    """The least seconds of several tries, each as long as its slowest worker took."""
    tries = []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        transfer()
        took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        tries.append(took.item())
    return min(tries)


def _exchange(values: torch.Tensor, inbox: torch.Tensor, peer: int, world_size: int) -> None:
    if peer >= world_size:
        return
    # Receiving first: the other way round, Gloo would use one direction at a time.
    receiving = dist.irecv(inbox, peer)
    sending = dist.isend(values, peer)
    assert receiving is not None
    assert sending is not None
    receiving.wait()
    sending.wait()


class _Pair:
    """A TCP connection between the two workers of a pair; none for a worker without a peer."""

    def __init__(self, rank: int, peer: int | None) -> None:
        self._connection: socket.socket | None = None
        if peer is None:
            return
        if rank < peer:
            with socket.create_server((f"host{rank}", PORT)) as server:
                server.settimeout(30)
                self._connection, _ = server.accept()
        else:
            self._connection = _connect(f"host{peer}")

    def __enter__(self) -> socket.socket | None:
        return self._connection

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()


def _connect(name: str) -> socket.socket:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((name, PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _exchange_raw(connection: socket.socket | None, num_bytes: int) -> None:
    if connection is None:
        return
    sender = threading.Thread(target=connection.sendall, args=(bytes(num_bytes),))
    sender.start()
    left, buffer = num_bytes, bytearray(1 << 18)
    while left:
        received = connection.recv_into(buffer, min(left, len(buffer)))
        if not received:
            raise ConnectionError("the peer closed the connection")
        left -= received
    sender.join()


def _sent_bytes(control: Control, rank: int) -> int:
    """What this worker's interface has sent, once the last packets are through."""
    dist.barrier()
    time.sleep(0.1)
    sent = control.counters()[rank].sent_bytes
    dist.barrier()
    return sent


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
