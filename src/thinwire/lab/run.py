"""A job for a lab, its result, and running it in a lab of its own, from outside the lab; no torch.

>>> from thinwire.hosts.description import describe
>>> job = Job(description=describe(hosts=4, rate="100mbit"), command=("hostname",))
>>> result = run(job)  # doctest: +SKIP
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError, UsageError, check
from thinwire.hosts.description import Description
from thinwire.hosts.machine import check_open_files
from thinwire.lab.namespaces import enter_command, tool_environment
from thinwire.lab.network import Counters

MAX_HOSTS = 254
"""Number of addresses in the lab's only subnet."""
FILES, FILES_PER_HOST = 64, 5
"""Open files of the lab's own process: per host its network, status, channel and two outputs."""
END_S = 15.0
"""Time that an interrupted lab has to end its workers before it is killed."""
# One thread per worker, as torchrun does; and only a process without threads can fork safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One command, started once per host."""

    description: Description
    command: tuple[str, ...]
    """`train.py ...` or `-m package ...`, with or without `python` before it, or any other program."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every worker, in addition to those of the lab."""
    time_limit_s: float | None = None
    grace_s: float = 5.0
    """Time between the first failure and ending the other workers, so that they can report it too."""
    keep_going: bool = False
    """Let the other workers finish after a failure."""
    prefix: bool = True
    """Begin every line of output with the name of its host."""

    def __post_init__(self) -> None:
        count = len(self.description.hosts)
        check(count <= MAX_HOSTS, "hosts", f"1 to {MAX_HOSTS}, one address each", count)
        check(bool(self.command), "command", "given", "", hint="thinwire lab run --hosts 4 -- train.py")
        match self.python_arguments:
            case ["-m", *rest]:
                check(bool(rest), "command", "given a module after -m", "-m")
            case [script, *_]:
                check(Path(script).is_file(), "command", "a script that exists", script)
        check(self.time_limit_s is None or self.time_limit_s > 0, "time limit", "above 0", self.time_limit_s)
        check(self.grace_s >= 0, "grace", "0 or more", self.grace_s)

    @property
    def python_arguments(self) -> tuple[str, ...]:
        """A script or `-m module` with its arguments, for a process with torch loaded; () for a program."""
        arguments = self.command[1:] if _is_this_python(self.command[0]) else self.command
        is_python = arguments[:1] == ("-m",) or (bool(arguments) and arguments[0].endswith(".py"))
        return arguments if is_python else ()


def _is_this_python(program: str) -> bool:
    # A link to the same file elsewhere is another virtual environment.
    found, ours = shutil.which(program), sys.executable
    return (
        found is not None
        and os.path.dirname(found) == os.path.dirname(ours)
        and os.path.samefile(found, ours)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """How the worker of one host ended."""

    host: int
    exit_code: int
    """The exit code as a shell reports it: 128 + signal when killed."""
    steps: int
    scheduled: bool
    """Whether a scheduled fault has killed it, which is no failure."""
    starts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LabResult:
    """The result of a job."""

    exit_code: int
    """0, or that of the first failure; 124 when the time limit was reached."""
    seconds: float
    workers: tuple[WorkerExit, ...]
    counters: tuple[Counters, ...]
    faults: tuple[str, ...]
    """Faults and failures, one line each, with their times."""
    warnings: tuple[str, ...]
    busy_share: float
    """Busy share of the processors' time while the workers trained."""
    reports: tuple[Any, ...] = ()
    """Values that workers passed to `Control.report`, in order."""


def run(job: Job) -> LabResult:
    """Run the job in a new lab and return its result. Nothing of the lab is left, however this ends."""
    count = len(job.description.hosts)
    check_open_files(FILES + FILES_PER_HOST * count, "hosts", count)
    command = enter_command()
    ours, theirs = Pipe()
    result: LabResult | ThinwireError | None = None
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*command, sys.executable, "-P", "-m", "thinwire.lab.supervisor", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**_ONE_THREAD, **tool_environment()},
            )
        try:
            with suppress(OSError, EOFError):
                ours.send(job)
                result = ours.recv()
        except KeyboardInterrupt:
            with suppress(OSError):
                ours.send("stop")  # whatever is sent: it ends the workers and reports
            _wait(process)
            raise
        finally:
            ours.close()
            _wait(process)
    if isinstance(result, ThinwireError):
        raise result
    if result is None:
        raise UsageError(f"the lab ended before its job did (exit code {process.returncode})")
    return result


def _wait(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    process.kill()  # does nothing if it has ended
    process.wait()
