"""Kill -9 a training at random moments, resume it each time, and compare with one that nobody disturbed.

    python -m benchmarks.kill_resume --kills 20

Runs the real command line: `thinwire train digits-cnn --workers 2 --save-every 4`, with dropout, AdamW and a
schedule. A kill takes one worker, or the command and all workers at once. The moment is random, and as a
checkpoint is written most of the time, many kills come in the middle of one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import parser_of, result_file
from thinwire.engine import folders
from thinwire.event_log import EventReader
from thinwire.events import RunStarted

WORKERS = 2
SAVE_EVERY = 4
EPOCHS = 10
NUM_STEPS = EPOCHS * 45
START_S = 120.0


def command(run: Path) -> list[str]:
    settings = ["--workers", str(WORKERS), "--epochs", str(EPOCHS), "--save-every", str(SAVE_EVERY)]
    return [sys.executable, "-m", "thinwire", "train", *settings, "--out", str(run), "--resume"]


def saved_step(run: Path) -> int:
    whole = folders.whole(run / "checkpoints")
    return int(whole[-1].name.partition("-")[2]) if whole else 0


def finish(run: Path) -> dict[str, Any]:
    """Let a run come to its end; return the state that its workers share."""
    done = subprocess.run(command(run), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run} failed: {done.stderr}")
    newest = folders.whole(run / "checkpoints")[-1]
    return folders.read_part(newest, folders.read_manifest(newest), folders.COMMON, ())


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended already


def disturb(run: Path, goal: int, dice: random.Random) -> dict[str, Any]:
    """Start or resume a run, and kill it a moment after it has saved step `goal`."""
    reader = EventReader(run)
    reader.poll()
    pids: dict[int, int] = {}
    resumed_from, began = saved_step(run), time.monotonic()
    with subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while saved_step(run) < goal or len(pids) < WORKERS:
            if process.poll() is not None or time.monotonic() - began > START_S:
                kill([process.pid, *pids.values()])
                raise SystemExit(f"{run} did not get to step {goal}; see its workers.log")
            events = reader.poll()
            pids |= {event.rank: event.record.pid for event in events if isinstance(event.record, RunStarted)}
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.15))
        victims = dice.choice([[pids[0]], [pids[1]], [process.pid, *pids.values()]])
        kill(victims)
        half_saved = any((run / "checkpoints").glob("*.saving-*"))
        status = process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
        time.sleep(0.02)
    return {
        "resumed_from": resumed_from,
        "killed_ranks": sorted(rank for rank, pid in pids.items() if pid in victims),
        "last_good": saved_step(run),
        "while_saving": half_saved,
        "status": status,
    }


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The places in which two trees do not have the same bits."""
    if isinstance(one, Tensor):
        if not torch.equal(one, other):
            yield where
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}[{index}]")
    elif one != other:
        yield where


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    file, dice = result_file("kill_resume", trial=arguments.kills < 20), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = finish(Path(scratch) / "undisturbed")
        run, kills = Path(scratch) / "killed", []
        for number in range(arguments.kills):
            goal = int((NUM_STEPS - 2 * SAVE_EVERY) * (number + dice.random()) / arguments.kills)
            kills.append({"goal": goal, **disturb(run, goal, dice)})
            print(f"kill {number + 1}: {kills[-1]}", flush=True)
        different = sorted(differences(undisturbed, finish(run)))
    hits = sum(each["while_saving"] for each in kills)
    print(f"{len(kills)} kills, {hits} of them while saving; different from the undisturbed run: {different}")
    print(file.save({"kills": kills, "while_saving": hits, "different": different}))
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
