"""One worker of a benchmark: `-m thinwire.bench.worker FOLDER steps SECONDS` or `FOLDER study NUMBER`.

FOLDER has a bench.json. Rank 0 writes what was measured into its event file there.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.bench import config as configs
from thinwire.bench.accuracy import train_study
from thinwire.bench.config import BenchConfig, Study
from thinwire.bench.measure import Paths, not_timed, time_block
from thinwire.bench.plan import Cell, blocks_of, cells, fits
from thinwire.bench.systems import EXACT, find, load_rivals
from thinwire.events import EventWriter
from thinwire.lab.control import Control
from thinwire.recipes.launch import LOG
from thinwire.recipes.worker import LIFELINE, ReportFailure, hold_on_to


def measure_steps(config: BenchConfig, allowed_s: float, paths: Paths, events: EventWriter) -> None:
    """Turn after turn through the grid, as long as there is time."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    rivals = load_rivals(config.rivals)
    systems = {name: find(name, rivals) for name in config.systems}
    absent = {name: reason for name, system in systems.items() if (reason := system.available())}
    began = time.monotonic()
    took_s: dict[Cell, float] = {}
    for turn in range(config.turns):
        for cell in cells(config, workers, shaped=paths.shaped):
            start = time.monotonic()
            if not agreed(
                fits(
                    turn=turn,
                    elapsed_s=start - began,
                    took_s=took_s.get(cell, 0.0),
                    allowed_s=allowed_s,
                )
            ):
                continue
            for block in blocks_of(config, cell, turn):
                system, reason = systems[block.system], absent.get(block.system)
                if reason is not None:
                    timed = not_timed(block, system, reason)
                else:
                    timed = time_block(block, system, paths, scale=config.scale, timed_s=config.block_s)
                if rank == 0:
                    events.write(timed)
            took_s[cell] = time.monotonic() - start


def measure_study(folder: Path, config: BenchConfig, study: Study, paths: Paths) -> None:
    """One system after the other, exact SGD first, as long as there is time."""
    rivals = load_rivals(config.rivals)
    began = time.monotonic()
    for name in sorted(config.systems, key=lambda name: name != EXACT):
        system = find(name, rivals)
        if system.available() is not None:
            continue
        if agreed(time.monotonic() - began < 60 * study.minutes):
            train_study(folder, study, system, paths)


def agreed(mine: bool) -> bool:
    """Rank 0's answer, on all workers."""
    answer = torch.tensor(int(mine))
    dist.broadcast(answer, src=0)
    return bool(answer)


def speak_into(log: Path) -> None:
    """Let what systems print go there; under torch's launcher it does already."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)


def work(arguments: list[str]) -> None:
    """Do one part of the benchmark."""
    folder, what, number = Path(arguments[0]), arguments[1], arguments[2]
    config = configs.read(folder)
    torch.set_num_threads(1)
    control = Control.of_this_worker()
    if control is not None:
        speak_into(folder / LOG)
    with EventWriter(folder, int(os.environ["RANK"])) as events, ReportFailure(events.write):
        dist.init_process_group("gloo")
        if what == "steps":
            measure_steps(config, float(number), Paths(control), events)
        else:
            measure_study(folder, config, config.studies[int(number)], Paths(control))
        dist.barrier()


def main() -> None:
    """Work, and end this process; its status is 1 after an error."""
    if os.environ.get(LIFELINE):
        hold_on_to(sys.stdin.fileno())
    status = 0
    try:
        work(sys.argv[1:])
    except Exception:  # noqa: BLE001  # all of it goes to the log; the reason is in the events
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: taking apart groups that systems have left behind can hang.
    os._exit(status)


if __name__ == "__main__":
    main()
