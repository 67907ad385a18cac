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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from thinwire.hosts.description import Host
from thinwire.lab.control import CONTROL_VARIABLE, STATUS_VARIABLE, HostStatus
from thinwire.lab.namespaces import enter_host
from thinwire.lab.network import INTERFACE
from thinwire.lab.run import Job

MASTER_PORT = 29500
SITE_VARIABLE = "THINWIRE_SITE"
"""Environment variable with the index of the host's site; set when there are several sites."""
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that the lab handles itself and that a worker must receive on its own."""
MAX_STOP_S = 10.0
"""Longest time that a worker waits for a fault scheduled at its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything a forked process needs to become the worker of a host."""

    job: Job
    host: int
    starts: int
    network: int
    """Open file of the host's network namespace."""
    outputs: tuple[int, int]
    """Open files for standard output and error."""
    control: Connection[Any, Any]
    status: int
    """Open file of the shared memory."""

    def environment(self) -> dict[str, str]:
        """Return torchrun's variables for one worker per machine, and the lab's own."""
        description, rank = self.job.description, str(self.host)
        world_size = str(len(description.hosts))
        site = description.hosts[self.host].site
        return {
            **self.job.environment,
            **dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), rank),
            **dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": description.hosts[0].address,
            "MASTER_PORT": str(MASTER_PORT),
            "TORCHELASTIC_RUN_ID": "lab",
            "TORCHELASTIC_RESTART_COUNT": str(self.starts - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": str(bool(self.job.python_arguments)),
            "PYTHONUNBUFFERED": "1",
            STATUS_VARIABLE: f"/proc/self/fd/{self.status}",
            CONTROL_VARIABLE: str(self.control.fileno()),
            **({SITE_VARIABLE: str(site)} if description.num_sites > 1 else {}),
        }

    def become(self) -> None:
        """Turn this process into the worker: its own session, output, network and environment."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        for source, target in zip(self.outputs, (1, 2), strict=True):
            os.dup2(source, target)
        for file in (self.control.fileno(), self.status):
            os.set_inheritable(file, True)
        enter_host(self.network, self.job.description.hosts[self.host].name)
        os.environ.update(self.environment())

    def run(self) -> NoReturn:
        """Run the command and end the process."""
        command = self.job.command
        if not self.job.python_arguments:
            try:
                os.execvp(command[0], command)
            except OSError as problem:
                print(f"cannot run {command[0]}: {problem.strerror}", file=sys.stderr)  # noqa: T201
                os._exit(127)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # forked workers would otherwise share numpy's seed
        if "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            faults = self.job.description.faults if self.starts == 1 else ()
            stops = {f.step for f in faults if f.host == self.host and f.step is not None}
            register_optimizer_step_post_hook(StepCounter(HostStatus.map(self.status), stops))
        _run_python(self.job.python_arguments)


def serve_store(network: int, host: Host) -> NoReturn:
    """Serve torch's rendezvous store on host 0, as torchrun's agent does: it outlives worker 0."""
    os.setsid()
    enter_host(network, host.name)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host.address, MASTER_PORT, is_master=True, wait_for_workers=False)
    while True:
        signal.pause()
        assert store  # it serves as long as it is referenced


def _run_python(arguments: Sequence[str]) -> NoReturn:
    """Run a script or module as Python would, and end the process with its exit code.

    The objects of the script (`_kept`) are not destroyed, since that can deadlock: the last owner of a Gloo
    group (a DDP wrapper, say) joins the group's threads while it holds the GIL, which one of them may be
    waiting for (torch 2.13).
    """
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[is_module:])
    sys.path.insert(0, os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent))
    run = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    _kept: object = None
    code = 0
    try:
        _kept = run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        _kept, code = end, end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as problem:  # noqa: BLE001  as Python does with a script that fails, less our frames
        _kept, code = problem, 130 if isinstance(problem, KeyboardInterrupt) else 1
        trace = problem.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        traceback.print_exception(type(problem), problem, trace or problem.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


class StepCounter:
    """Optimizer hook that counts steps, waits at scheduled faults, and slows down a slow host.

    It counts the steps of the first optimizer only, not of an outer optimizer beside it.
    """

    def __init__(
        self,
        status: HostStatus,
        stops: set[int],
        *,
        used_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._status, self._stops = status, stops
        self._used_s, self._sleep = used_s, sleep
        self._counted: weakref.ref[Any] | None = None
        self._before_s = used_s()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        counted = self._counted and self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        # Only this thread's processor time is stretched: waiting for peers is not computing, and an
        # emulated accelerator, which sleeps, slows itself down.
        if self._status.speed < 1:
            self._sleep((self._used_s() - self._before_s) * (1 / self._status.speed - 1))
        self._status.steps = steps = self._status.steps + 1
        if steps in self._stops:
            waited_s = 0.0
            while self._status.released < steps and waited_s < MAX_STOP_S:
                self._sleep(0.001)
                waited_s += 0.001
        self._before_s = self._used_s()
