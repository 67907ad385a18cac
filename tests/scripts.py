"""Runs scripts as `python SCRIPT` and `torchrun SCRIPT` do, in forked processes that have torch already."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

import thinwire
from tests.patience import HANGS_S
from tests.worlds import exit_interpreter, fork_context


def _main(
    command: Sequence[str], output: str, environment: dict[str, str], attach: Callable[..., Any] | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    if attach is not None:
        vars(thinwire)["attach"] = attach
    code = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
        code = 1
    exit_interpreter(code)


def _torchrun(workers: int | None, store: TCPStore) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _others(workers: int | None) -> dict[str, str]:
    """What Slurm scripts and Kubernetes set: rank 0 makes the store itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}


def run_script(
    script: Path,
    workers: int | None = None,
    *,
    arguments: Sequence[object] = (),
    attach: Callable[..., Any] | None = None,
    torchrun: bool = True,
    timeout_s: float = HANGS_S,
) -> list[str]:
    """What the script has printed; with `workers`, what each of them has, in torchrun's environment or in
    that of another launcher.

    With `attach`, that takes the place of thinwire's.
    """
    command = [str(script), *map(str, arguments)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = _torchrun(workers, store) if torchrun else _others(workers)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(workers or 1)]
        processes = []
        for rank, output in enumerate(outputs):
            place = {} if workers is None else {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            job = (command, str(output), {**os.environ, **place}, attach)
            processes.append(fork_context().Process(target=_main, args=job, daemon=True))
            processes[-1].start()
        try:
            for process, output in zip(processes, outputs, strict=True):
                process.join(timeout_s)
                assert process.exitcode == 0, output.read_text()
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [output.read_text() for output in outputs]
