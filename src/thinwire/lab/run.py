"""Runs a job in a lab of its own, from outside it; no torch.

>>> from thinwire.hosts.description import describe
>>> job = Job(description=describe(hosts=4, rate="100mbit"), command=("hostname",))
>>> outcome = run(job)  # doctest: +SKIP
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys

from thinwire.errors import ThinwireError, UsageError
from thinwire.lab.job import Job, Outcome
from thinwire.lab.namespaces import enter_command, tool_environment

END_S = 15.0
"""How long an interrupted lab may take to end its workers before it is ended itself."""
STOP = b"s"
"""Sent to a running lab: end the workers and report."""
_LENGTH = struct.Struct("=q")


def run(job: Job) -> Outcome:
    """Make the lab, run the job in it, and report. Nothing of the lab is left, however this ends."""
    command = enter_command()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            process = subprocess.Popen(
                [*command, sys.executable, "-P", "-m", "thinwire.lab.inside", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**_quiet_threads(), **tool_environment()},
            )
        try:
            result = _converse(ours, job)
        except KeyboardInterrupt:
            ours.send(STOP)
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


def _converse(channel: socket.socket, job: Job) -> Outcome | ThinwireError | None:
    try:
        send_message(channel, pickle.dumps(job))
        message = receive_message(channel)
    except OSError:
        return None
    result = pickle.loads(message) if message else None
    assert result is None or isinstance(result, Outcome | ThinwireError)
    return result


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _quiet_threads() -> dict[str, str]:
    # One thread per worker, as torchrun does; and forking needs a process without threads.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def send_message(channel: socket.socket, data: bytes) -> None:
    """Send bytes with their length in front."""
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(channel: socket.socket) -> bytes:
    """The next bytes sent; none when the other side is gone."""
    header = _receive(channel, _LENGTH.size)
    return _receive(channel, _LENGTH.unpack(header)[0]) if header else b""


def _receive(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
