"""Measures a user's training script as it is: run for some steps in a process of its own, then ended.

As a module this is that process: `python -m thinwire.planner.script RESULT train.py ...`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from thinwire.errors import SettingError, UsageError
from thinwire.planner.workload import Workload

LIMIT_S = 300.0
LAST_LINES = 3


def measure_script(command: Sequence[str], *, limit_s: float = LIMIT_S) -> Workload:
    """Run `train.py arguments...` for some steps with one thread, as torchrun would, and time them."""
    hint = "the script must train with an optimizer of torch; give its arguments after it, in quotes"
    script = Path(command[0])
    if not script.is_file():
        raise SettingError(f"script must be a file, got {command[0]!r}", hint=hint)
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "workload.json", Path(folder) / "errors"
        try:
            code = _run([str(result), *command], errors, limit_s)
        except subprocess.TimeoutExpired:
            problem = f"{script.name} did not make enough optimizer steps to be timed within {limit_s:g} s"
            raise UsageError(problem, hint=hint) from None
        if not result.exists():
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = " / ".join(lines[-LAST_LINES:]) or "it said nothing"
            how = f"failed with exit code {code}" if code else "ended"
            raise UsageError(f"{script.name} {how} before it could be timed: {said}", hint=hint)
        content = json.loads(result.read_text(encoding="utf-8"))
    content["shapes"] = tuple(tuple(shape) for shape in content["shapes"])
    content["shares"] = None if content["shares"] is None else tuple(content["shares"])
    return Workload(**content)


def _run(arguments: Sequence[str], errors: Path, limit_s: float) -> int:
    """The exit code; whatever the script has started (loaders of data) ends with it.

    Its errors go to a file: a pipe would stay open as long as one of those holds it.
    """
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.planner.script", *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    """A world of one worker, for scripts that start a process group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"OMP_NUM_THREADS": "1", **os.environ, **world}


class Enough(BaseException):
    """Raised in the script's optimizer step once enough were seen."""


def main() -> None:
    from thinwire.planner.measure import STEPS, WARM_UP, StepRecorder

    result, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).absolute().parent))
    recorder = StepRecorder(stop_after=WARM_UP + STEPS + 1, stop=Enough)
    try:
        with recorder.recording():
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit:
        if recorder.num_steps < WARM_UP:
            raise
    found = recorder.workload(Path(script).name)
    Path(result).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads and process groups of the script are not waited for
