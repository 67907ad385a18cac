"""The worker of `thinwire lab check`: times and reports transfers. Its arguments are BYTES REPEATS."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.errors import UsageError
from thinwire.lab.control import Control
from thinwire.lab.network import sent_by_this_host

PORT = 29600


def main() -> None:
    num_bytes, repeats = int(sys.argv[1]), int(sys.argv[2])
    control = Control.from_environment()
    if control is None:
        raise UsageError("this is a part of the lab", hint="run `thinwire lab check`")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values, received = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    raw = received.numpy().data.cast("B")
    peer = rank ^ 1 if rank ^ 1 < world_size else None
    found: dict[str, float] = {}
    if rank == 0:
        control.restart_load()
    connection = _connect(rank, peer)
    found["exchange, TCP"] = _best_s(lambda: _exchange_raw(connection, raw), repeats)
    found["exchange, Gloo"] = _best_s(lambda: _exchange_gloo(values, received, peer), repeats)
    _best_s(lambda: dist.all_reduce(received[:1]), 1)  # connect the ring
    before = _sent_bytes()
    found["all-reduce, Gloo"] = _best_s(lambda: dist.all_reduce(values), repeats)
    expected = 2 * (world_size - 1) / world_size * num_bytes * repeats
    found["counted"] = (_sent_bytes() - before) / expected
    if rank == 0:
        control.report(found)
    dist.barrier()
    dist.destroy_process_group()


def _best_s(transfer: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several tries, each as long as its slowest worker took."""
    tries = []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        transfer()
        took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        tries.append(took.item())
    return min(tries)


def _exchange_gloo(values: torch.Tensor, received: torch.Tensor, peer: int | None) -> None:
    if peer is not None:
        # The receive comes first: with the send first, Gloo uses one direction at a time.
        for work in (dist.irecv(received, peer), dist.isend(values, peer)):
            assert work is not None
            work.wait()


def _connect(rank: int, peer: int | None) -> socket.socket | None:
    """Open a TCP connection between the two workers of a pair; None for a worker without a peer.

    It has no time-out: only the job's time limit knows how long transfers may take.
    """
    with socket.create_server((f"host{rank}", PORT)) as server:
        dist.barrier()  # all workers listen
        if peer is None:
            return None
        server.settimeout(30.0)
        return server.accept()[0] if rank < peer else socket.create_connection((f"host{peer}", PORT))


def _exchange_raw(connection: socket.socket | None, buffer: memoryview) -> None:
    if connection is None:
        return
    sender = threading.Thread(target=connection.sendall, args=(bytes(len(buffer)),))
    sender.start()
    if connection.recv_into(buffer, flags=socket.MSG_WAITALL) < len(buffer):
        raise ConnectionError("the peer closed the connection")
    sender.join()


def _sent_bytes() -> int:
    """Return the bytes this worker's host has sent, after the last packets have passed."""
    dist.barrier()
    time.sleep(0.1)
    sent = sent_by_this_host()
    dist.barrier()
    return sent


if __name__ == "__main__":
    main()
