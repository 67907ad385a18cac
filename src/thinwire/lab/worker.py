"""One worker process of the lab: in its host's network, with torchrun's environment; torch only if loaded."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from thinwire.hosts.description import Host
from thinwire.lab.control import CONTROL_VARIABLE
from thinwire.lab.job import Job
from thinwire.lab.namespaces import enter_host
from thinwire.lab.network import INTERFACE
from thinwire.lab.pace import PACE_VARIABLE, Pace

MASTER_PORT = 29500
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What the lab handles itself and a worker must hear on its own."""
LONGEST_STOP_S = 10.0
"""A worker waits at most this long for a fault scheduled at its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Birth:
    """What a forked process needs to become the worker of a host; all numbers are open files."""

    job: Job
    host: int
    starts: int
    network: int
    outputs: tuple[int, int]
    control: int
    pace: int

    def environment(self) -> dict[str, str]:
        """torchrun's variables for one worker per machine, and the lab's own."""
        world = str(len(self.job.description.hosts))
        return {
            **self.job.environment,
            "RANK": str(self.host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": world,
            "ROLE_RANK": str(self.host),
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.job.description.hosts[0].address,
            "MASTER_PORT": str(MASTER_PORT),
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": str(self.starts - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.job.is_python),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "PYTHONUNBUFFERED": "1",
            PACE_VARIABLE: f"/proc/self/fd/{self.pace}",
            CONTROL_VARIABLE: str(self.control),
        }

    def become(self) -> None:
        """Turn this process into the worker: its own session, output, network and environment."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        for source, target in zip(self.outputs, (1, 2), strict=True):
            os.dup2(source, target)
        for file in (self.control, self.pace):
            os.set_inheritable(file, True)
        enter_host(self.network, self.job.description.hosts[self.host].name)
        os.environ.update(self.environment())

    def run(self) -> None:
        """Run the command; for a program this does not return."""
        command = list(self.job.command)
        if not self.job.is_python:
            try:
                os.execvp(command[0], command)
            except OSError as problem:
                print(f"cannot run {command[0]}: {problem.strerror}", file=sys.stderr)  # noqa: T201
                os._exit(127)
        stops = {f.step for f in self.job.description.faults if f.host == self.host and f.step is not None}
        pace = Pace(Path(os.environ[PACE_VARIABLE]))
        _reseed()
        _count_steps(pace, stops if self.starts == 1 else set())
        _run_python(command)


def serve_store(network: int, host: Host) -> None:
    """Be the agent of host 0: keep the store that workers meet at, whatever becomes of worker 0."""
    os.setsid()
    enter_host(network, host.name)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host.address, MASTER_PORT, is_master=True, wait_for_workers=False)
    while store:
        signal.pause()


def _run_python(command: list[str]) -> NoReturn:
    """Run a script or module as Python would, and leave with its exit code."""
    sys.argv = command[1:] if command[0] == "-m" else command
    folder = os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path.insert(0, folder)
    kept: object = None
    code = 0
    try:
        if command[0] == "-m":
            kept = runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            kept = runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        kept, code = end, _exit_code(end)
    except BaseException as problem:  # noqa: BLE001  as Python does with a script that fails, less our frames
        kept, code = problem, 130 if isinstance(problem, KeyboardInterrupt) else 1
        trace = problem.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        traceback.print_exception(type(problem), problem, trace or problem.__traceback__)
    _leave(code, kept)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _leave(code: int, kept: object) -> NoReturn:
    """End the process after its exit handlers, but without taking apart what the script made (`kept`).

    Taking it apart can hang for ever: the last owner of a Gloo group (a DDP wrapper, say) joins the group's
    threads while it holds Python's lock, which one of them may be waiting for (torch 2.13).
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _reseed() -> None:
    # Forked workers would share numpy's entropy; separate processes would not.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _count_steps(pace: Pace, stops: set[int]) -> None:
    """Report optimizer steps to the lab, stop where a fault is due, and be as slow as the host is."""
    if "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(StepCounter(pace, stops))


class StepCounter:
    """Called after every optimizer step. Counts those of one optimizer, not of an outer one beside it."""

    def __init__(
        self,
        pace: Pace,
        stops: set[int],
        *,
        used_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace = pace
        self._stops = stops
        self._used_s = used_s
        self._sleep = sleep
        self._counted: weakref.ref[Any] | None = None
        self._before_s = used_s()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        counted = self._counted() if self._counted is not None else None
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        # Only what this thread computed is stretched: waiting for others is not computing, and an
        # emulated accelerator, which sleeps, is slow by itself.
        spent_s = self._used_s() - self._before_s
        speed = self._pace.speed
        if speed < 1:
            self._sleep(spent_s * (1 / speed - 1))
        steps = self._pace.steps + 1
        self._pace.steps = steps
        if steps in self._stops:
            waited_s = 0.0
            while self._pace.released < steps and waited_s < LONGEST_STOP_S:
                self._sleep(0.001)
                waited_s += 0.001
        self._before_s = self._used_s()
