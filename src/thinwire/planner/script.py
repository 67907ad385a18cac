"""Measures a user's training script as it is: run for some steps in a process of its own, then ended.

Several of these can run at once, as the workers of a lab do on the cores of one machine: each goes on until
all have been timed. As a module this is one of them: `python -m thinwire.planner.script RESULT train.py ...`.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from thinwire.errors import SettingError, UsageError
from thinwire.hosts.machine import KEEPS_MEMORY
from thinwire.planner.workload import Workload

LIMIT_S = 300.0
HANGS = (
    "does it wait for something, or load much data first? then give it less, or plan from sizes: "
    "--params N --layers N --compute TIME"
)
LAST_LINES = 3
POLL_S = 0.02
NO_STEPS = 85
"""Exit code of a script that came to its end without enough steps; few programs use it."""
LONGEST_S = 2 * LIMIT_S
"""A script that nobody ends, since the process that measures it was killed, ends itself."""


def measure_script(command: Sequence[str], *, limit_s: float = LIMIT_S, at_once: int = 1) -> Workload:
    """Run `train.py arguments...` for some steps with one thread, as torchrun would, and time them.

    `at_once`: so many of them together as in a lab and with its environment, none of which rests before all
    have been timed; the slowest counts.
    """
    hint = "the script must train with an optimizer of torch; give its arguments after it, in quotes"
    script = Path(command[0])
    if not script.is_file():
        raise SettingError(f"script must be a file, got {command[0]!r}", hint=hint)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(index) for index in range(at_once)]
        results = [place.with_suffix(".json") for place in places]
        codes = _run(command, places, results, limit_s)
        ended_first = sorted(zip(places, results, codes, strict=True), key=lambda each: each[2] is None)
        for place, result, code in ended_first:
            if result.exists():
                continue
            lines = place.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = " / ".join(line.strip() for line in lines[-LAST_LINES:]) or "it said nothing"
            if code is None:
                problem = f"did not make enough optimizer steps to be timed within {limit_s:g} s"
                raise UsageError(f"{script.name} {problem}: {said}", hint=HANGS)
            if code in (0, NO_STEPS):
                raise UsageError(f"{script.name} ended before it could be timed: {said}", hint=hint)
            failed = f"failed with exit code {code} before it could be timed: {said}"
            raise UsageError(f"{script.name} {failed}", hint=f"does `python {shlex.join(command)}` run here?")
        found = [json.loads(result.read_text(encoding="utf-8")) for result in results]
    content = max(found, key=lambda each: each["forward_s"] + each["backward_s"] + each["optimizer_s"])
    content["shapes"] = tuple(tuple(shape) for shape in content["shapes"])
    content["shares"] = None if content["shares"] is None else tuple(content["shares"])
    return Workload(**content)


def _run(
    command: Sequence[str], places: Sequence[Path], results: Sequence[Path], limit_s: float
) -> list[int | None]:
    """The exit codes, None of those that have not ended by themselves; whatever the scripts have started
    (loaders of data) ends with them.

    Their errors go to files, the `places`: a pipe would stay open as long as one of those holds it.
    """
    processes = list[subprocess.Popen[bytes]]()
    deadline_s = time.monotonic() + limit_s
    # What was timed while another was still starting says nothing about all at once: the third time counts,
    # or the last one of a script that ends before.
    rounds = 1 if len(results) == 1 else 3
    try:
        for place, result in zip(places, results, strict=True):
            with place.open("wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", "thinwire.planner.script", str(result), *command],
                    env=_environment() if rounds == 1 else {**KEEPS_MEMORY, **_environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            processes.append(process)
        written: list[set[int]] = [set() for _ in results]
        while time.monotonic() < deadline_s:
            for times, result in zip(written, results, strict=True):
                if result.exists():
                    times.add(result.stat().st_mtime_ns)
            enough = all(len(times) >= rounds for times in written)
            if enough or any(process.poll() is not None for process in processes):
                break
            time.sleep(POLL_S)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
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
    """Raised in the script's optimizer step."""


def main() -> None:
    from thinwire.planner.measure import StepRecorder

    result, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).absolute().parent))
    began_s = time.monotonic()

    def save() -> None:
        part = Path(f"{result}.part")
        part.write_text(json.dumps(asdict(recorder.workload(Path(script).name))), encoding="utf-8")
        part.rename(result)
        if time.monotonic() - began_s > LONGEST_S:
            raise Enough

    recorder = StepRecorder(timed=save)
    try:
        with recorder.recording():
            runpy.run_path(script, run_name="__main__")
    except Enough:
        return
    except SystemExit:
        if not recorder.num_steps:
            raise
    if not Path(result).exists():
        save()


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:  # the last line is what the user is shown
        sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
        os._exit(NO_STEPS)
    sys.stdout.flush()
    os._exit(0)  # threads and process groups of the script are not waited for
