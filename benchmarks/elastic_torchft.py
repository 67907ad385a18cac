"""A worker of `benchmarks.elastic --torchft`: the training of `elastic_worker.py` with torchft 0.2.0.

python -m benchmarks.elastic_torchft SECONDS

Every worker is a replica group of one. Gradients are averaged by `Manager.allreduce` over torchft's Gloo
group: its DistributedDataParallel ends with an AssertionError in `_comm_hook` when a worker dies. The
lighthouse is a process of its own on the first host, and is never killed. Workers write down their steps as
thinwire's do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.elastic_worker import BATCH_SIZE, STEP_S
from thinwire.elastic.journal import Journal

PORT = 29700
TIMEOUT = timedelta(seconds=10)
LIGHTHOUSE = (
    "import sys; from torchft.coordination import LighthouseServer; "
    f"server = LighthouseServer(bind='[::]:{PORT}', min_replicas=1, join_timeout_ms=100); sys.stdin.read()"
)


def main() -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    seconds, rank = float(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if rank == 0:
        subprocess.Popen([sys.executable, "-c", LIGHTHOUSE], stdin=subprocess.PIPE, start_new_session=True)
    host = socket.gethostbyname(socket.gethostname())
    first = os.environ["MASTER_ADDR"]
    _wait_for_port(first)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{PORT}",
        replica_id=f"worker_{rank}",
        hostname=host,
    )
    optimizer = OptimizerWrapper(manager, sgd)
    data, journal = torch.randn(BATCH_SIZE, 64), Journal()
    journal.note("member", id=str(rank), host=host, port=PORT, pid=os.getpid(), rank=rank)
    began_s = time.monotonic()
    while time.monotonic() < began_s + seconds:
        optimizer.zero_grad()
        time.sleep(STEP_S)
        net(data).square().mean().backward()
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        flat = torch.cat([each.view(-1) for each in gradients])
        manager.allreduce(flat).wait()
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            journal.note("done", steps=manager.current_step(), size=manager.num_participants())
    sys.stdout.flush()
    os._exit(0)


def _wait_for_port(host: str) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            socket.create_connection((host, PORT), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
