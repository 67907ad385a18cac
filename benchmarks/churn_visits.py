"""The part of `benchmarks.churn` with a thousand generations: a worker joins and leaves, again and again.

Two workers stay. A third process joins them, trains a few steps, leaves with an error, and joins again: so
that what a worker keeps open after it has left shows as well.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.churn_processes import NUM_SAMPLES, SILENCE_S, Wire, read_open, train
from thinwire.chaos.journals import Journals
from thinwire.elastic.journal import VARIABLE
from thinwire.elastic.keys import write_key
from thinwire.strategies.registry import from_text
from thinwire.wire.tls.files import make

READ_EVERY = 25
"""Visits between two readings."""
STAYS = 2


class _Leaves(Exception):
    """A visitor has seen enough."""


def visit(
    environment: dict[str, str], strategy: str, wire: Wire, addresses: list[str], seed: int, count: int
) -> None:
    """Join and leave, again and again; after every visit a line says how many there were."""
    os.environ.update(environment)
    dice = random.Random(seed)
    torch.set_num_threads(1)
    data = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64)
    for number in range(count):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        elastic, steps = tw.Elastic(join=addresses), dice.randrange(1, 6)
        try:
            with tw.attach(
                model, optimizer, from_text(strategy), elastic=elastic, silence_s=SILENCE_S, wire=wire
            ) as link:
                sampler = link.sampler(NUM_SAMPLES, batch_size=8)
                for _ in link.epochs(1_000_000):
                    for step in link.each_step(sampler):
                        with step as batch:
                            model(data[batch]).square().mean().backward()
                            optimizer.step()
                            optimizer.zero_grad()
                        steps -= step.done
                        if steps <= 0:
                            raise _Leaves
                    link.all_reduce([0.0])  # as those do who stay
        except _Leaves:
            Path(environment["VISITS"]).write_text(str(number + 1))


def visits(folder: Path, strategy: str, wire: Wire, seed: int, count: int, minutes: float) -> dict[str, Any]:
    """One world with a visitor that comes `count` times."""
    (folder / "journals").mkdir()
    write_key(folder / "run.key")
    if wire == "tls":
        make(folder / "run.pem", days=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {
        "THINWIRE_KEY_FILE": str(folder / "run.key"),
        "OUTPUT": str(folder / "workers.log"),
        "VISITS": str(folder / "visits"),
    }
    place = {"WORLD_SIZE": str(STAYS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.churn_visits"])
    stay = []
    for rank in range(STAYS):
        mine = {**common, **place, "RANK": str(rank), VARIABLE: str(folder / "journals")}
        if rank == 1:
            mine["COUNTS"] = str(folder / "counts")
        arguments = (mine, strategy, str(folder / "stop"), wire)
        stay.append(context.Process(target=train, args=arguments, daemon=True))
        stay[-1].start()
    journals, readings, wrong = Journals(folder / "journals"), list[dict[str, int]](), list[str]()
    while not (len(journals.workers) == STAYS and all(any(each.of("done")) for each in journals.workers)):
        time.sleep(0.1)
        journals.poll()
    addresses = [each.address for each in journals.workers]
    guest = context.Process(target=visit, args=(common, strategy, wire, addresses, seed, count), daemon=True)
    guest.start()
    assert guest.pid is not None
    assert stay[1].pid is not None
    deadline, done, moved_s = time.monotonic() + 60 * minutes, 0, time.monotonic()
    while guest.is_alive() and time.monotonic() < deadline:
        time.sleep(0.2)
        now = int((folder / "visits").read_text() or 0) if (folder / "visits").exists() else 0
        if now // READ_EVERY > done // READ_EVERY:
            both = (("stays", stay[1].pid), ("comes", guest.pid))
            found = {f"{who}_{k}": v for who, pid in both for k, v in read_open(pid).items()}
            held = json.loads((folder / "counts").read_text())  # of the last epoch that was over
            readings.append({"visits": now, **found, **held})
        if now > done:
            done, moved_s = now, time.monotonic()
        elif time.monotonic() > moved_s + 60.0:
            wrong.append(f"visit {done + 1} has not ended after a minute")
            break
    guest.kill()
    guest.join()
    (folder / "stop").touch()
    for each in stay:
        each.join(60.0)
        if each.exitcode != 0:
            wrong.append(f"a worker that stayed ended with {each.exitcode}")
            each.kill()
    journals.poll()
    trains = [line.facts["generation"] for each in journals.workers for line in each.of("trains")]
    ends = {end.facts["model"] for each in journals.workers if (end := each.ended) is not None}
    if len(ends) != 1:
        wrong.append(f"{len(ends)} models at the end")
    return {
        "what": "visits",
        "strategy": strategy,
        "wire": wire,
        "seed": seed,
        "faults": done,
        "runs": 1,
        "generations": max(trains, default=0),
        "readings": readings,
        "wrong": wrong,
    }
