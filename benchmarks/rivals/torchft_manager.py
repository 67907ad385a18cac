"""The manager of every worker and the one lighthouse that torchft's systems need.

Every worker is a replica group of its own, with its own manager and store; the lighthouse runs beside
worker 0.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

PATIENCE = timedelta(minutes=5)


def missing_torchft() -> str | None:
    """Why torchft cannot be used, if so."""
    return None if importlib.util.find_spec("torchft") else "not installed: pip install torchft==0.2.0"


@contextmanager
def torchft_manager() -> Iterator[Any]:
    """A manager of this worker, known to the lighthouse; all workers enter and leave together."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    rank, world_size, host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world_size) if rank == 0 else None
    address = [lighthouse.address() if lighthouse else ""]
    dist.broadcast_object_list(address, src=0)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=world_size,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"worker_{rank}",
        hostname=host,
        init_sync=False,
    )
    try:
        yield manager
    finally:
        dist.barrier()
        manager.shutdown(wait=False)
        if lighthouse:
            lighthouse.shutdown()
