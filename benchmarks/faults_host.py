"""A host of `benchmarks.faults`: forks a worker for each trial, helps with its fault, and keeps time.

Run by the lab on every host, which stays for many trials:

    python -m benchmarks.faults_host FOLDER

Hosts meet in a folder: `trials.json` is what to do, `NUMBER-RANK.log` has the events of a worker.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.faults_trials import NUM_HOSTS, Trial
from benchmarks.faults_worker import note, run
from thinwire.hosts.description import Host
from thinwire.lab.control import Control

POLL_S = 0.02
LIMIT_S = 85.0
"""For a whole trial: start, fault, and the time after which a worker hangs."""
PRELOADED = ("numba", "torch._dynamo", "thinwire.compress.cpu", "thinwire.strategies.registry")
FIRST_PORT = 30_000
_job: list[Callable[[], None]] = []
"""Of a forked process."""


def address_of(host: int) -> str:
    return Host(index=host, rate_bit_per_s=1).address


def fork(work: Callable[..., None], *args: Any) -> int:
    """Run `work(*args)` in a forked process as if it were a script of its own, to the very end."""
    pid = os.fork()
    if pid:
        return pid
    _job.append(partial(work, *args))
    # As `python -c` does it: an error is printed and kept in sys.last_value, SystemExit gives the exit code,
    # and the interpreter is finalized. The text sees the names of this file, which is __main__.
    failed = ctypes.pythonapi.PyRun_SimpleString(b"_job.pop()()")
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
    raise AssertionError("unreachable")


def be_worker(trial: Trial, rank: int, host: Connection[Any, Any], folder: Path) -> None:
    output = (folder / f"{trial.number}-{rank}.out").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_"))]:
        del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(trial.hosts)),
        "MASTER_ADDR": address_of(trial.hosts[0]),
        "MASTER_PORT": str(FIRST_PORT + trial.number),
        "TORCHELASTIC_USE_AGENT_STORE": str(trial.store == "agent"),
    }
    run(trial, rank, host, folder / f"{trial.number}-{rank}.log")


def be_store(trial: Trial) -> None:
    store = TCPStore(
        address_of(trial.hosts[0]), FIRST_PORT + trial.number, is_master=True, wait_for_workers=False
    )
    while True:
        signal.pause()
        assert store


class Meeting:
    """Files by which hosts wait for each other."""

    def __init__(self, folder: Path, host: int) -> None:
        self._folder, self._host = folder, host

    def say(self, what: str) -> None:
        (self._folder / f"{what}-{self._host}").touch()

    def said(self, what: str, hosts: Any) -> bool:
        return all((self._folder / f"{what}-{host}").exists() for host in hosts)

    def meet(self, what: str) -> None:
        self.say(what)
        deadline = time.monotonic() + 2 * LIMIT_S
        while not self.said(what, range(NUM_HOSTS)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all hosts came to {what}")
            time.sleep(POLL_S)


def host_trial(trial: Trial, rank: int, meeting: Meeting, control: Control, folder: Path) -> None:
    """Fork the worker and attend to it until all have ended."""
    ours, theirs = Pipe()
    store = fork(be_store, trial) if rank == 0 and trial.store == "agent" else 0
    worker = fork(be_worker, trial, rank, theirs, folder)
    theirs.close()
    began_s, continue_s, cut = time.monotonic(), float("inf"), ""
    others = [host for host in trial.hosts if host != trial.hosts[rank]]
    ended, killed = False, False
    while not ended:
        waited, status = os.waitpid(worker, os.WNOHANG)
        now_s = time.monotonic()
        if waited:
            ended, code = True, os.waitstatus_to_exitcode(status)
            note(folder / f"{trial.number}-{rank}.log", "end", code=code, killed=killed)
        elif now_s > began_s + LIMIT_S and not killed:
            killed = True
            os.kill(worker, signal.SIGUSR1)  # writes down where it hangs
            time.sleep(0.5)
            os.kill(worker, signal.SIGKILL)
        elif trial.kind == "stop" and rank == trial.victim and meeting.said(f"{trial.number}-ended", others):
            os.kill(worker, signal.SIGKILL)
        if now_s > continue_s:
            continue_s = float("inf")
            os.kill(worker, signal.SIGCONT)
        try:
            while not ended and ours.poll(0):
                what, _, value = ours.recv().partition(":")
                if what == "continue":
                    continue_s = time.monotonic() + float(value)
                else:
                    control.fault(f"{what}:{value}")
                    cut = value.split(",")[0]
                ours.send(None)
        except (EOFError, OSError):
            pass  # it has ended
        if not ended:
            time.sleep(POLL_S)
    meeting.say(f"{trial.number}-ended")
    while not meeting.said(f"{trial.number}-ended", trial.hosts):
        time.sleep(POLL_S)
    if cut:
        control.fault(f"heal:{cut}")
    if store:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


def main() -> None:
    folder, host = Path(sys.argv[1]), int(os.environ["RANK"])
    control, meeting = Control.from_environment(), Meeting(folder, host)
    assert control is not None, "to be run in a lab"
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    for each in json.loads((folder / "trials.json").read_text()):
        trial = Trial(**{**each, "hosts": tuple(each["hosts"])})
        meeting.meet(f"{trial.number}-begin")
        if host in trial.hosts:
            host_trial(trial, trial.hosts.index(host), meeting, control, folder)
        meeting.meet(f"{trial.number}-over")
        meeting.say(f"{trial.number}-written")


if __name__ == "__main__":
    main()
