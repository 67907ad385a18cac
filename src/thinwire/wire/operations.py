"""Operations as a backend starts them: collectives, and exchanges by Gloo and by NCCL.

Each gives what blocks until it is done. The facts of the backends this rests on are in `process_group.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from thinwire.traffic import Op
from thinwire.wire.base import Buffer, Peer
from thinwire.wire.ring import RING_BYTES, ring_reduce_scatter
from thinwire.wire.waiters import Wait

Issue = Callable[[], Wait]
"""Starts an operation; the result blocks until it is done."""
_SUM = c10d.AllreduceOptions()


def collective(
    backend: Any,
    op: Op,
    data: Tensor,
    out: Tensor,
    *,
    source: int,
    number: int,
    rank: int,
    world_size: int,
    by_ring: bool,
) -> Wait:
    """Start the `number`-th collective of a lane; `by_ring`: large reduce-scatters go around a ring."""
    handle: Any
    if op == "all_reduce":
        handle = backend.allreduce([data], _SUM)
    elif op == "all_gather":
        handle = backend._allgather_base(out, data, AllgatherOptions())
    elif op == "all_to_all":
        handle = backend.alltoall_base(out, data, [], [], c10d.AllToAllOptions())
    elif op == "broadcast":
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        handle = backend.broadcast([data], options)
    elif not by_ring:
        handle = backend._reduce_scatter_base(out, data, c10d.ReduceScatterOptions())
    elif data.nbytes >= RING_BYTES:
        return ring_reduce_scatter(backend, number, rank, world_size, data, out)
    else:
        parts = torch.empty_like(data)
        received = backend.alltoall_base(parts, data, [], [], c10d.AllToAllOptions())

        def wait_and_sum() -> None:
            received.wait()
            torch.sum(parts.view(world_size, -1), dim=0, out=out.view(-1))

        return wait_and_sum
    wait: Wait = handle.wait
    return wait


def gloo_exchange(backend: Any, send: Buffer, to: Peer, recv: Buffer, source: Peer, tag: int) -> Wait:
    """Start an exchange; tensors on a GPU go through pinned memory."""
    inbox = recv if recv is None or not recv.is_cuda else pinned_like(recv)
    outbox = send if send is None or not send.is_cuda else pinned_like(send).copy_(send)
    handles = []
    if inbox is not None and source is None:
        handles.append(backend.recv_anysource([inbox], tag))  # TLS only: see `listens_to`
    elif inbox is not None:
        handles.append(backend.recv([inbox], source, tag))
    if outbox is not None:
        handles.append(backend.send([outbox], to, tag))

    def wait() -> None:
        for handle in handles:
            handle.wait()
        if recv is not None and inbox is not None and inbox is not recv:
            recv.copy_(inbox)

    return wait


def nccl_exchange(backend: Any, send: Buffer, to: Peer, recv: Buffer, source: Peer, tag: int) -> Wait:
    """Start an exchange, both halves in one group."""
    backend._start_coalescing()
    if recv is not None:
        backend.recv([recv], source, tag)
    if send is not None:
        backend.send([send], to, tag)
    wait: Wait = backend._end_coalescing().wait
    return wait


def pinned_like(data: Tensor) -> Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
