"""Worlds to test in: threads in one process (milliseconds), and Gloo processes (the truth).

Worker processes are forked from a server that imports torch and thinwire once per test process, so that a
world starts in 0.1 s instead of 3.5 s of imports per worker. Every job still gets fresh processes: one that
kills, freezes or poisons a worker harms no other.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.patience import HANGS_S
from thinwire.wire.local import LocalLane, LocalWorld

T = TypeVar("T")


def fork_context() -> ForkServerContext:
    """Processes of this context are forked from the server, which is started by the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def has_ipv6() -> bool:
    """Whether this host has an address of that kind."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def run_threads(world_size: int, worker: Callable[[LocalLane], T], timeout_s: float = HANGS_S) -> list[T]:
    """Run `worker` in one thread per rank; the results in order of rank, or the first error raised."""
    world = LocalWorld(world_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = worker(world.lane(rank))
        except BaseException as error:  # noqa: BLE001 (any error of a worker is the test's error)
            errors.append(error)
            world.lose(error)

    threads = [threading.Thread(target=run, args=(r,), name=f"worker-{r}") for r in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        world.lose(TimeoutError("test world took too long"))
        raise TimeoutError(f"{[t.name for t in threads if t.is_alive()]} still run after {timeout_s} s")
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


def exit_interpreter(code: int) -> None:
    """End a forked process as Python ends any process: atexit handlers, threads, finalization, exit code.

    A forked process would end by `os._exit`, and hide what a library does wrong at exit. What libraries say
    about objects that are still there is of no interest here: those of the server are.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    ctypes.pythonapi.Py_Exit(code)


def _process(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    environment: dict[str, str],
    work: Callable[..., Any],
    args: Any,
) -> None:
    os.environ.clear()  # the server's is that of the first test that needed it
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = io.BytesIO()
        torch.save(work(*args), result)  # as bytes: a pipe would pass tensors on as shared memory
        pipe.send((True, result.getvalue()))
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 (reported to the test)
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))
        pipe.close()
        os._exit(1)  # a group with something under way cannot be shut down
    exit_interpreter(0)


class Processes:
    """Worker processes of a Gloo world, each running `work(*args)`."""

    def __init__(self, world_size: int, work: Callable[..., Any], *args: Any) -> None:
        context = fork_context()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self.workers = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            parameters = (rank, world_size, self._store.port, theirs, dict(os.environ), work, args)
            process = context.Process(target=_process, args=parameters, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.workers.append(process)

    def outcome(self, rank: int, timeout_s: float) -> tuple[bool, Any]:
        """Whether the worker ended well, with exit code 0, and its result or error."""
        pipe, process = self._pipes[rank], self.workers[rank]
        try:
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"worker {rank} has not ended after {timeout_s} s")
            well, result = pipe.recv()
        except EOFError:
            well, result = False, "died"
        process.join(timeout_s)
        if well and process.exitcode != 0:
            return False, f"exit code {process.exitcode} after its work was done"
        return well, result

    def kill(self) -> None:
        for process in self.workers:
            if process.is_alive():
                process.kill()
            process.join()


def run_processes(world_size: int, work: Callable[..., T], *args: Any, timeout_s: float = HANGS_S) -> list[T]:
    """Run `work(*args)` in Gloo processes; the results in order of rank."""
    processes = Processes(world_size, work, *args)
    try:
        outcomes = [processes.outcome(rank, timeout_s) for rank in range(world_size)]
    finally:
        processes.kill()
    for rank, (well, result) in enumerate(outcomes):
        if not well:
            raise AssertionError(f"worker {rank}: {result}")
    return [torch.load(io.BytesIO(result), weights_only=False) for _, result in outcomes]


def _script(rank: int, world_size: int, port: int, environment: dict[str, str], name: str, args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    del store
    module, function = name.split(":")
    # As `python -c` runs it: an error is kept in sys.last_value, SystemExit ends the process at once.
    text = f"import {module}; {module}.{function}(*{args!r})"
    exit_interpreter(1 if ctypes.pythonapi.PyRun_SimpleString(text.encode()) else 0)


def exit_codes(
    world_size: int, work: Callable[..., object], *args: Any, timeout_s: float = HANGS_S
) -> list[int | None]:
    """Run `work(*args)` as a script in processes of a Gloo world; how each has ended, None for not at all."""
    context = fork_context()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    name = f"{work.__module__}:{work.__name__}"
    workers = []
    for rank in range(world_size):
        parameters = (rank, world_size, store.port, dict(os.environ), name, args)
        workers.append(context.Process(target=_script, args=parameters, daemon=True))
        workers[-1].start()
    deadline = time.monotonic() + timeout_s
    for process in workers:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in workers]
    for process in workers:
        process.kill()
        process.join()
    return codes
