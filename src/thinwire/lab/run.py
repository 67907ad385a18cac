"""A job for a lab, its result, and running it in a lab of its own, from outside the lab; no torch.

The lab is the first process of a pid namespace, so that the kernel ends everything in it with that process.
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
from thinwire.hosts.machine import KEEPS_MEMORY, check_open_files
from thinwire.lab.network import Counters, run_tool, tool_environment

FILES, FILES_PER_HOST = 64, 5
"""Open files of the lab's own process: per host its network, status, channel and two outputs."""
END_S = 15.0
"""Time that an interrupted lab has to end its workers before it is killed."""
# One thread per worker, as torchrun does; and only a process without threads can fork safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
"""Programs that a lab needs, and the packages that have them."""
_TEST_SCRIPT = """
ip link add test0 type bridge && ip link add test1 type veth peer name test2 &&
tc qdisc add dev test1 root tbf rate 1mbit burst 16kb limit 64kb
"""


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
    faults_from_first_step: bool = False
    """Count `after=` of faults from the first step of any worker, instead of the start of all."""
    prefix: bool = True
    """Begin every line of output with the name of its host."""

    def __post_init__(self) -> None:
        count = len(self.description.hosts)
        check(count <= 254, "hosts", "1 to 254, one address each", count)
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
        found, ours = shutil.which(self.command[0]) or "", sys.executable
        # A link to the same file elsewhere is another virtual environment.
        is_ours = os.path.dirname(found) == os.path.dirname(ours) and os.path.samefile(found, ours)
        arguments = self.command[1:] if is_ours else self.command
        is_python = arguments[:1] == ("-m",) or (bool(arguments) and arguments[0].endswith(".py"))
        return arguments if is_python else ()


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
    started_at: float = 0.0
    """When the workers were started, in seconds since 1970."""
    reports: tuple[Any, ...] = ()
    """Values that workers passed to `Control.report`, in order."""


def enter_command() -> list[str]:
    """Return the command that starts another command inside new namespaces.

    Tried in this order: as root, through a user namespace (rootless), and both without a /proc of its own
    (containers often forbid that). Raises UsageError saying what is missing when none works.
    """
    path = tool_environment()["PATH"]
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=path) is None:
            problem = f"the lab needs `{tool}`, which is not installed"
            raise UsageError(problem, hint=f"apt-get install {package}")
    common = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    rootless = ["--user", "--map-root-user"]
    refusals = []
    for extra in (["--mount-proc"], []):
        for user in ([], rootless) if os.geteuid() == 0 else (rootless,):
            command = [*common, *user, *extra]
            refusal = _refusal(command)
            if refusal is None:
                # The lab ends by itself when our end of its channel closes; the signal is for a lab too
                # stuck to notice.
                dies = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv", path=path) else []
                return [*dies, *command]
            refusals.append(f"`{' '.join(command[1:])}`: {refusal}")
    raise UsageError("this machine does not allow network namespaces\n" + "\n".join(refusals), hint=_advice())


def _refusal(command: list[str]) -> str | None:
    """Return why `command` cannot create a shaped path, or None if it can."""
    done = run_tool([*command, "sh", "-ec", _TEST_SCRIPT])
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _advice() -> str:
    for setting, bad, good in (
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("user.max_user_namespaces", "0", "10000"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        path = Path("/proc/sys", *setting.split("."))
        if path.exists() and path.read_text().strip() == bad:
            return f"as root: sysctl {setting}={good}"
    return (
        "run as root, or in a container started with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined; the kernel needs bridge, veth and sch_tbf"
    )


def run(job: Job) -> LabResult:
    """Run the job in a new lab and return its result. Nothing of the lab is left, however this ends."""
    count = len(job.description.hosts)
    check_open_files(FILES + FILES_PER_HOST * count, "hosts", count)
    command = enter_command()
    ours, theirs = Pipe()
    result: LabResult | ThinwireError | None = None
    with theirs:
        process = subprocess.Popen(
            [*command, sys.executable, "-P", "-m", "thinwire.lab.supervisor", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**_ONE_THREAD, **KEEPS_MEMORY, **tool_environment()},
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
