"""Elastic worlds of real processes on this machine, and what happens to them."""

from __future__ import annotations

import faulthandler
import hashlib
import io
import os
import signal
import socket
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from tests.worlds import exit_interpreter, fork_context
from thinwire.elastic.keys import write_key
from thinwire.elastic.world import Elastic
from thinwire.errors import PeerLost
from thinwire.strategies.base import Strategy

NUM_SAMPLES = 240
SILENCE_S = 3.0
SOON_S = 60.0


@dataclass
class Story:
    """What one worker tells when it is through."""

    id: str
    digest: str
    """Of the model."""
    seen: list[tuple[int, int]]
    """Epoch and sample, for all that it has trained on."""
    steps: int
    generation: int
    world_size: int
    times: list[tuple[float, int]]
    """When steps ended, and in which generation."""
    descriptors: int
    threads: int
    sums: list[list[float]]
    """What calls of all together gave."""


@dataclass(frozen=True)
class Fault:
    """What a worker does to itself."""

    kind: str = "none"
    step: int = 0
    seconds: float = 0.0
    """How long it waits before it does that."""
    where: str = "backward"


@dataclass(frozen=True, kw_only=True)
class Job:
    strategy: Strategy = field(default_factory=tw.AllReduce)
    num_epochs: int = 2
    batch_size: int = 5
    step_s: float = 0.03
    fixed: str = "worker"
    key_file: str = ""
    call_s: float = 0.0
    """After each epoch, the first worker takes so long until it comes to a call of all together."""
    wire: str = "plain"


def train(job: Job, fault: Fault, tell: Connection) -> Story:
    """Train, and tell of every step."""
    import threading

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen: list[tuple[int, int]] = []
    times: list[tuple[float, int]] = []
    sums: list[list[float]] = []

    def strike(where: str, step: int) -> None:
        if (where, step) != (fault.where, fault.step):
            return
        time.sleep(fault.seconds)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "raise":
            raise ValueError("a bug")
        elif fault.kind == "lose":
            raise PeerLost("somebody is lost")

    elastic = Elastic(key_file=job.key_file)
    wire: Any = job.wire
    with tw.attach(model, optimizer, job.strategy, elastic=elastic, silence_s=SILENCE_S, wire=wire) as link:
        tell.send(("at", link._elastic.world.me.to_json(), os.getpid()))
        sampler = link.sampler(NUM_SAMPLES, batch_size=job.batch_size, fixed=job.fixed)
        for epoch in link.epochs(job.num_epochs):
            for step in link.each_step(_Loader(sampler)):
                with step as batch:
                    time.sleep(job.step_s)
                    strike("forward", link.stats.steps)
                    loss = (model(data[batch]) - data[batch].sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    strike("backward", link.stats.steps)
                    optimizer.step()
                    optimizer.zero_grad()
                if step.done:
                    seen += [(epoch, index) for index in batch]
                    times.append((time.time(), link.generation))
                    tell.send(("step", link.stats.steps, link.generation))
            if job.call_s:
                tell.send(("call", epoch))
                time.sleep(job.call_s if link.rank == 0 else 0.0)
                strike("call", epoch)
                sums.append(link.all_reduce([1.0, float(epoch)]))
                sums.append([float(len(link.all_gather_object(epoch)))])
        steps, generation, world_size = link.stats.steps, link.generation, link.world_size
        me = link._elastic.world.me.id
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return Story(me, digest, seen, steps, generation, world_size, times, descriptors, threads, sums)


class _Loader:
    """A loader that gives the indices themselves."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Any:
        return iter(self._sampler)


def _run(environment: dict[str, str], job: Job, fault: Fault, tell: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` shows where a worker hangs
    try:
        result = io.BytesIO()
        torch.save(train(job, fault, tell), result)
        tell.send(("end", result.getvalue()))
    except BaseException as error:  # noqa: BLE001 (told to the test)
        traceback.print_exc()
        tell.send(("error", f"{type(error).__name__}: {error}"))
        tell.close()
        os._exit(1)
    exit_interpreter(0)


class Workers:
    """Processes of one elastic world."""

    def __init__(self, size: int, job: Job, faults: dict[int, Fault] | None = None) -> None:
        self._job = job
        self._context = fork_context()
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self.said: list[list[Any]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            self._start(
                {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, (faults or {}).get(rank)
            )

    def join(self, contact: int, **environment: str) -> int:
        """Start one more, by way of worker `contact`; gives its number."""
        host, port = self.wait_for(contact, "at")[1][1:]
        self._start({"THINWIRE_JOIN": f"127.0.0.1:1,{host}:{port}", **environment}, None)
        return len(self.processes) - 1

    def _start(self, place: dict[str, str], fault: Fault | None) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        environment = {**os.environ, **place}
        process = self._context.Process(
            target=_run, args=(environment, self._job, fault or Fault(), theirs), daemon=True
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        self._pipes.append(ours)
        self.said.append([])

    def wait_for(self, number: int, kind: str, least: int = 0) -> Any:
        """Until a worker has said this, or has made so many steps."""
        deadline = time.monotonic() + SOON_S
        while True:
            for message in self.said[number]:
                if message[0] == kind and (kind != "step" or message[1] >= least):
                    return message
            left_s = deadline - time.monotonic()
            try:
                if left_s <= 0 or not self._pipes[number].poll(left_s):
                    raise TimeoutError(
                        f"worker {number} has not said {kind} {least}: {self.said[number][-3:]}"
                    )
                self.said[number].append(self._pipes[number].recv())
            except EOFError:
                last = self.said[number][-3:]
                raise AssertionError(f"worker {number} ended before it said {kind} {least}: {last}") from None
            if self.said[number][-1][0] == "error" and kind != "error":
                raise AssertionError(f"worker {number}: {self.said[number][-1][1]}")

    def signal(self, number: int, which: signal.Signals) -> float:
        os.kill(self.processes[number].pid, which)
        return time.time()

    def stories(self, numbers: list[int]) -> list[Story]:
        found = [self.wait_for(number, "end")[1] for number in numbers]
        for number in numbers:
            self.processes[number].join(SOON_S)
            assert self.processes[number].exitcode == 0
        return [torch.load(io.BytesIO(each), weights_only=False) for each in found]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def make_key(folder: Path) -> str:
    path = folder / "run.key"
    write_key(path)
    return str(path)


def count_samples(stories: list[Story]) -> Counter[tuple[int, int]]:
    return Counter(each for story in stories for each in story.seen)
