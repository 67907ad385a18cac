"""The first process of a lab: makes the network, loads torch once, forks the workers.

Started as `python -m thinwire.lab.inside FD`, with FD a socket to the process that wants the lab. It sends
the job and receives the outcome; when it goes away, so does the lab.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import socket
import sys

from thinwire.errors import ThinwireError
from thinwire.lab.job import Job, Outcome
from thinwire.lab.namespaces import know_hosts
from thinwire.lab.network import Network
from thinwire.lab.run import receive_message, send_message
from thinwire.lab.staff import BecomeWorker
from thinwire.lab.supervisor import Supervisor
from thinwire.lab.worker import Birth

PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo")
"""Loaded before forking: 2 s for all workers together instead of 2 s each."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    job = pickle.loads(receive_message(channel))
    assert isinstance(job, Job)
    try:
        result: Outcome | ThinwireError | Birth = _run(job, channel)
    except ThinwireError as problem:
        result = problem
    except BecomeWorker as worker:
        result = worker.birth
    if isinstance(result, Birth):
        result.become()
        result.run()
    else:
        send_message(channel, pickle.dumps(result))
        gc.unfreeze()  # or libraries complain at the end about what was not collected (Triton 3.9)


def _run(job: Job, channel: socket.socket) -> Outcome:
    network = Network(job.description)
    know_hosts({host.name: host.address for host in job.description.hosts})
    if job.is_python:
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page the workers share
    return Supervisor(job, network, channel).run()


if __name__ == "__main__":
    main()
