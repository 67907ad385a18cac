"""The worker processes of a lab: forking, signalling and reaping them, their output and requests.

A worker runs in its host's network with torchrun's environment. It uses torch only if that is loaded.
"""

from __future__ import annotations

import atexit
import os
import runpy
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from thinwire.errors import ThinwireError
from thinwire.hosts.description import Host
from thinwire.lab.control import CONTROL_VARIABLE, STATUS_VARIABLE, HostStatus, StepCounter
from thinwire.lab.network import INTERFACE, enter_host
from thinwire.lab.run import Job

MASTER_PORT = 29500
SITE_VARIABLE = "THINWIRE_SITE"
"""Environment variable with the index of the host's site; set when there are several sites."""
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that the lab handles itself and that a worker must receive on its own."""

Answer = Callable[[dict[str, Any]], object]


class BecomeWorker(BaseException):
    """Raised in a forked process with the function to go on with, once the stack of the lab has unwound."""


class LabWorker:
    """The worker of one host: what the lab knows of its process, and what the process itself does."""

    def __init__(self, job: Job, host: Host, network: int) -> None:
        self.host = host
        self.pid = self.starts = 0
        self.exit_code: int | None = None
        """The exit code as a shell reports it; None while the process runs."""
        self.scheduled = False
        """Whether a scheduled fault has killed it."""
        self._job, self._network = job, network
        # Reused when the worker starts again: whoever has mapped the memory sees the new worker's steps.
        self._status_file = os.memfd_create(f"status{host.index}")
        self.status = HostStatus.create(self._status_file)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send a signal to the worker and the processes it started."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it was forked just now and has no session of its own yet

    def start(self, selector: selectors.BaseSelector, answer: Answer) -> None:
        """Fork the process, for the first time or again; in the child this raises BecomeWorker."""
        self.status = HostStatus.create(self._status_file, speed=self.host.speed)
        self.starts += 1
        self.exit_code, self.scheduled = None, False
        ours, theirs = Pipe()
        pipes = [os.pipe(), os.pipe()]
        # Blocked until the child has handlers of its own: a signal in between would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _close_in_child(selector)
            raise BecomeWorker(partial(self._live, [writing for _, writing in pipes], theirs))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        theirs.close()  # the worker has its own copy; with ours open, its end would go unnoticed
        answer_requests(ours, selector, answer)
        prefix = f"[{self.host.name}] " if self._job.prefix else ""
        for (reading, writing), target in zip(pipes, (1, 2), strict=True):
            os.close(writing)
            forward_output(reading, target, prefix, selector)

    # In the forked process

    def _live(self, outputs: Sequence[int], control: Connection[Any, Any]) -> NoReturn:
        """Turn this process into the worker, with its own session, output and network; run the command."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        for source, target in zip(outputs, (1, 2), strict=True):
            os.dup2(source, target)
        for file in (control.fileno(), self._status_file):
            os.set_inheritable(file, True)
        enter_host(self._network, self.host.name)
        os.environ.update(self._environment(control.fileno()))
        self._run()

    def _environment(self, control: int) -> dict[str, str]:
        """Return torchrun's variables for one worker per machine, and the lab's own."""
        description, rank = self._job.description, str(self.host.index)
        world_size = str(len(description.hosts))
        return {
            **self._job.environment,
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
            "TORCHELASTIC_USE_AGENT_STORE": str(bool(self._job.python_arguments)),
            "PYTHONUNBUFFERED": "1",
            STATUS_VARIABLE: f"/proc/self/fd/{self._status_file}",
            CONTROL_VARIABLE: str(control),
            **self._way_back(),
            **({SITE_VARIABLE: str(self.host.site)} if description.num_sites > 1 else {}),
        }

    def _way_back(self) -> dict[str, str]:
        """Where a worker that is started again finds an elastic world that listens on a known port."""
        port = self._job.environment.get("THINWIRE_PORT")
        if self.starts == 1 or port is None:
            return {}
        others = [host for host in self._job.description.hosts if host is not self.host]
        return {"THINWIRE_JOIN": ",".join(f"{host.address}:{port}" for host in others)}

    def _run(self) -> NoReturn:
        command = self._job.command
        if not self._job.python_arguments:
            try:
                os.execvp(command[0], command)
            except OSError as problem:
                print(f"cannot run {command[0]}: {problem.strerror}", file=sys.stderr)  # noqa: T201
                os._exit(127)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # forked workers would otherwise share numpy's seed
        if "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            faults = self._job.description.faults if self.starts == 1 else ()
            stops = {f.step for f in faults if f.host == self.host.index and f.step is not None}
            register_optimizer_step_post_hook(StepCounter(self.status, stops))
        _run_python(self._job.python_arguments)


def start_store(network: int, host: Host, selector: selectors.BaseSelector) -> None:
    """Fork a process that serves torch's rendezvous store, as torchrun's agent does: it outlives worker 0."""
    if os.fork() != 0:
        return
    _close_in_child(selector)
    os.setsid()
    enter_host(network, host.name)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host.address, MASTER_PORT, is_master=True, wait_for_workers=False)
    while True:
        signal.pause()
        assert store  # it serves as long as it is referenced


def _close_in_child(selector: selectors.BaseSelector) -> None:
    for key in selector.get_map().values():
        # An object must be closed as one: collected later, it would close a reused descriptor.
        os.close(key.fileobj) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
    selector.close()


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


def forward_output(source: int, target: int, prefix: str, selector: selectors.BaseSelector) -> None:
    """Copy complete lines from a pipe to `target`, each with a prefix, until the other side closes it."""
    rest = b""

    def ready() -> None:
        nonlocal rest
        data = os.read(source, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        if not data and rest:
            lines = [rest]
        text = b"".join(prefix.encode() + line + b"\n" for line in lines)
        with suppress(BrokenPipeError):  # the reader (head, less) is gone; the run continues
            while text:
                text = text[os.write(target, text) :]
        if not data:
            selector.unregister(source)
            os.close(source)

    selector.register(source, selectors.EVENT_READ, ready)


def answer_requests(source: Connection[Any, Any], selector: selectors.BaseSelector, answer: Answer) -> None:
    """Answer every request that arrives, if need be with an error, until the other side closes."""

    def ready() -> None:
        try:
            try:
                source.send(answer(source.recv()))
            except ThinwireError as refusal:
                source.send(refusal)
        except (EOFError, OSError):  # it has ended
            selector.unregister(source)
            source.close()

    selector.register(source, selectors.EVENT_READ, ready)
