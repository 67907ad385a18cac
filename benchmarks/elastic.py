"""Elastic worlds under faults: seconds from a fault to the next step of all who are left; samples counted.

Real processes on this machine. A worker is killed (the first one, another, or half of them) or frozen at a
step drawn from a seed. `missing` counts samples that neither those who are left nor, up to the step of the
fault, those who are lost have trained on (negative: done again). `python -m benchmarks.elastic --trials 20`
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.common import parser_of, result_file
from thinwire.strategies.registry import from_text

NUM_SAMPLES = 480
BATCH_SIZE = 4
STEP_S = 0.02
HANG_S = 90.0
KINDS = ("kill", "kill the first", "kill half", "freeze")


def train(rank: int, size: int, port: int, strategy: str, num_epochs: int, tell: Connection) -> None:
    """One worker: tells of its steps, and at the end of its model and samples."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64)
    seen = []
    with tw.attach(model, optimizer, from_text(strategy), elastic=True) as link:
        sampler = link.sampler(NUM_SAMPLES, batch_size=BATCH_SIZE)
        for epoch in link.epochs(num_epochs):
            for step in link.each_step(sampler):
                with step as batch:
                    time.sleep(STEP_S)
                    model(data[batch]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if step.done:
                    seen += [(epoch, index) for index in batch]
                    tell.send(("step", time.time(), link.steps, link.world_size))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    tell.send(("end", digest, seen))


def trial(size: int, strategy: str, kind: str, generator: random.Random) -> dict[str, Any]:
    """One training with one fault."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.elastic"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    frozen = kind == "freeze"
    victims = {
        "kill the first": [0],
        "kill half": list(range(size // 2)),
    }.get(kind, [generator.randrange(1, size)])
    left = [rank for rank in range(size) if rank not in victims]
    at_step, pipes, workers = generator.randrange(5, 30), {}, []
    for rank in range(size):
        pipes[rank], theirs = context.Pipe(duplex=False)
        arguments = (rank, size, port, strategy, 3, theirs)
        workers.append(context.Process(target=train, args=arguments, daemon=True))
        workers[-1].start()
        theirs.close()
    struck_s, deadline = 0.0, time.monotonic() + HANG_S
    first_steps: dict[int, float] = {}
    ends: dict[int, Any] = {}
    try:
        while len(ends) < len(left) and time.monotonic() < deadline:
            by_pipe = {pipes[rank]: rank for rank in left if rank not in ends}
            for pipe in wait(list(by_pipe), timeout=1.0):
                assert isinstance(pipe, Connection)
                rank = by_pipe[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    ends[rank] = None
                    continue
                if message[0] == "end":
                    ends[rank] = message[1:]
                elif struck_s and message[1] > struck_s and message[3] < size:
                    first_steps.setdefault(rank, message[1])
                elif not struck_s and message[2] >= at_step:
                    struck_s = time.time()
                    for victim in victims:
                        os.kill(workers[victim].pid or 0, signal.SIGSTOP if frozen else signal.SIGKILL)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    told = [end for end in ends.values() if end is not None]
    counts = Counter(sample for _, seen in told for sample in seen)
    return {
        "size": size,
        "strategy": strategy,
        "kind": kind,
        "step": at_step,
        "seconds": max(first_steps.values(), default=float("nan")) - struck_s,
        "hang": len(ends) < len(left),
        "failed": len(ends) - len(told),
        "agree": len({digest for digest, _ in told}) == 1,
        "doubled": sum(count > 1 for count in counts.values()),
        "missing": 3 * NUM_SAMPLES - len(counts) - len(victims) * at_step * BATCH_SIZE,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator, found = random.Random(options.seed), []
    saved = result_file("elastic")
    for number in range(options.trials):
        kind = KINDS[number % len(KINDS)]
        strategy = generator.choice(["all-reduce", "gossip-grad", "sasgd:interval=4", "topk:density=0.25"])
        found.append(trial(generator.choice(options.sizes), strategy, kind, generator))
        print(found[-1], flush=True)
        saved.save({"seed": options.seed, "load": os.getloadavg()}, trials=found)
    print(saved.path)


if __name__ == "__main__":
    main()
