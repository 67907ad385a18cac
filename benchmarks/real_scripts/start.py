"""Start a script on its workers: under torchrun, or forked from this process, which has torch already.

Importing torch three times takes most of a short run. Forked workers get the environment that torchrun gives,
and differ in one thing only: they end without shutting down their interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from benchmarks.common import ROOT
from benchmarks.real_scripts import worker

TIME_LIMIT_S = 300.0
LATE = 124
"""The exit code of a run that did not end in time, as `timeout` has it."""

Start = Callable[[Path, Path, Sequence[str], int], tuple[int, str]]
"""From folder for losses, script, arguments and number of workers to an exit code and the output."""


def under_torchrun(losses: Path, script: Path, arguments: Sequence[str], num_workers: int) -> tuple[int, str]:
    """As a user would; one worker is started without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    command = [sys.executable, *(launcher if num_workers > 1 else ())]
    command += ["-m", "benchmarks.real_scripts.worker", str(losses), str(script), *arguments]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    try:
        ran = subprocess.run(
            command,
            cwd=script.parent,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return LATE, late.stdout.decode() if late.stdout else ""
    return ran.returncode, ran.stdout


def forked(losses: Path, script: Path, arguments: Sequence[str], num_workers: int) -> tuple[int, str]:
    """The same in a fraction of the time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "TORCHELASTIC_RUN_ID": "real_scripts",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = []
    for rank in range(num_workers):
        place = {} if num_workers == 1 else {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        settings = (str(losses), str(script), list(arguments), place, losses / f"{rank}.txt")
        processes.append(multiprocessing.get_context("fork").Process(target=_forked, args=settings))
        processes[-1].start()
    try:
        end = time.monotonic() + TIME_LIMIT_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [LATE if process.exitcode is None else process.exitcode for process in processes]
    finally:  # they hold the socket of the store too, so nobody else would end them
        for process in processes:
            process.kill()
            process.join()
    written = [(losses / f"{rank}.txt").read_text(errors="replace")[-2000:] for rank in range(num_workers)]
    return next((code for code in codes if code), 0), "\n".join(written)


def _forked(losses: str, script: str, arguments: list[str], place: dict[str, str], output: Path) -> None:
    os.environ.update(place, OMP_NUM_THREADS="1")
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.chdir(Path(script).parent)
    try:
        worker.run(losses, script, arguments)
    except BaseException:
        traceback.print_exc()
        raise
