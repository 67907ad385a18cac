"""The part of `benchmarks.churn` with real processes: one world that is changed again and again."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import thinwire as tw
from thinwire.chaos.journals import Journals, WorkerJournal
from thinwire.chaos.samples import account
from thinwire.elastic.journal import VARIABLE
from thinwire.elastic.keys import write_key
from thinwire.strategies.registry import from_text

Wire = Literal["plain", "tls"]
LEAST, MOST = 2, 5
"""Workers at one time."""
NUM_SAMPLES = 480
SILENCE_S = 1.5
WAIT_S = 60.0
"""A change that has not led to training after so long is a hang."""
LOOK_S = 0.05
NOTE_EVERY = 20
"""Generations between two looks at what Python holds."""
READ_EVERY = 5
"""Changes between two readings of what the worker that lives through all has open."""


def train(environment: dict[str, str], strategy: str, stop: str, wire: Wire = "plain") -> None:
    """One worker, until somebody has made the file `stop`; where `COUNTS` names a file, what Python holds is
    written there now and then."""
    os.environ.update(environment)
    noted = -NOTE_EVERY
    if counts := os.environ.get("COUNTS"):
        tracemalloc.start(1)
    with open(environment["OUTPUT"], "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64)
    with tw.attach(
        model, optimizer, from_text(strategy), elastic=True, silence_s=SILENCE_S, wire=wire
    ) as link:
        sampler = link.sampler(NUM_SAMPLES, batch_size=8)
        for _ in link.epochs(1_000_000):
            for step in link.each_step(sampler):
                with step as batch:
                    time.sleep(0.002)
                    model(data[batch]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if counts and link.generation >= noted + NOTE_EVERY:
                noted = link.generation
                note_held(Path(counts), noted)
            if link.all_reduce([float(os.path.exists(stop))])[0] > 0:
                break
    sys.stdout.flush()
    os._exit(0)  # as the lab does: a torn-down Gloo may hang


def note_held(path: Path, generation: int) -> None:
    """Write what Python holds just now, for another process to read."""
    gc.collect()
    python_kib = tracemalloc.get_traced_memory()[0] // 1024
    held = {"generation": generation, "objects": len(gc.get_objects()), "python_kib": python_kib}
    path.with_suffix(".new").write_text(json.dumps(held))
    path.with_suffix(".new").replace(path)


@dataclass(slots=True)
class Churn:
    """One world and what is done to it."""

    folder: Path
    strategy: str
    seed: int
    _alive: list[Any] = field(default_factory=list)
    """Processes; the first one started lives through all."""
    _counts: Counter[str] = field(default_factory=Counter)
    _wrong: list[str] = field(default_factory=list)
    _readings: list[dict[str, int]] = field(default_factory=list)
    _number: int = 0
    _journals: Journals = field(init=False)
    _context: Any = field(init=False)

    def run(self, num_faults: int, minutes: float) -> dict[str, Any]:
        dice, began_s = random.Random(self.seed), time.monotonic()
        (self.folder / "journals").mkdir()
        write_key(self.folder / "run.key")
        self._journals = Journals(self.folder / "journals")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.churn_processes"])
        self._context = context
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        for rank in range(3):
            place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self._start({**place, "RANK": str(rank)})
        lasting = self._alive[1]  # not the first: that one may die too
        try:
            while sum(self._counts.values()) < num_faults and time.monotonic() < began_s + 60 * minutes:
                if not self._settled():
                    self._wrong.append(f"after {self._counts}: no step of all for {WAIT_S:g} s")
                    self._dump()
                    break
                if sum(self._counts.values()) % READ_EVERY == 0:
                    self._readings.append({"workers": len(self._alive), **read_open(lasting.pid)})
                self._change(dice, lasting)
            if not self._wrong and not self._settled():
                self._wrong.append(f"at the end: no step of all for {WAIT_S:g} s")
            self._end(lasting)
        finally:
            for each in self._alive:
                each.kill()
                each.join()
        return self._result()

    def _start(self, place: dict[str, str]) -> None:
        environment = {
            **place,
            "OUTPUT": str(self.folder / f"{self._number}.log"),
            "THINWIRE_KEY_FILE": str(self.folder / "run.key"),
            VARIABLE: str(self.folder / "journals"),
        }
        self._number += 1
        arguments = (environment, self.strategy, str(self.folder / "stop"))
        process = self._context.Process(target=train, args=arguments, daemon=True)
        process.start()
        self._alive.append(process)

    def _journal(self, pid: int) -> WorkerJournal | None:
        return next((each for each in self._journals.workers if each.pid == pid), None)

    def _settled(self) -> bool:
        """Whether all who live train in one generation, soon."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self._journals.poll()
            found = [self._journal(each.pid) for each in self._alive]
            newest = [_newest(each) for each in found]
            if newest[0] is not None and len(set(newest)) == 1 and newest[0][1] == len(self._alive):
                return True
            time.sleep(LOOK_S)
        return False

    def _change(self, dice: random.Random, lasting: Any) -> None:
        """One fault, or two at one moment."""
        others = [each for each in self._alive if each is not lasting]
        able = ["join"] if len(self._alive) < MOST else []
        able += ["kill", "kill"] if len(self._alive) > LEAST else []
        able += ["freeze", "short freeze"] if len(self._alive) > 2 else []
        weights = [1 if "freeze" in kind else 6 for kind in able]
        kind = dice.choices(able, weights)[0]
        self._counts[kind] += 1
        if kind == "join":
            addresses = [j.address for each in self._alive if (j := self._journal(each.pid)) is not None]
            self._start({"RANK": str(self._number), "THINWIRE_JOIN": ",".join(addresses)})
            if dice.random() < 0.2 and len(self._alive) > LEAST + 1:  # while the new one comes
                time.sleep(dice.uniform(0.0, 1.0))
                self._kill(dice.choice(others))
                self._counts["kill"] += 1
        elif kind == "kill":
            time.sleep(dice.uniform(0.0, 0.1))
            self._kill(dice.choice(others))
        else:
            victim = dice.choice(others)
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(SILENCE_S * (0.4 if kind == "short freeze" else 2.0))
            os.kill(victim.pid, signal.SIGCONT)

    def _kill(self, victim: Any) -> None:
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        self._alive.remove(victim)

    def _end(self, lasting: Any) -> None:
        self._readings.append({"workers": len(self._alive), **read_open(lasting.pid)})
        (self.folder / "stop").touch()
        for each in self._alive:
            each.join(WAIT_S)
            if each.exitcode != 0:
                self._wrong.append(f"a worker that was left ended with {each.exitcode}")

    def _dump(self) -> None:
        """What the last ones wrote, for whoever looks for the cause."""
        for path in sorted(self.folder.glob("*.log")):
            if (text := path.read_text().strip()) and path.stat().st_size:
                sys.stderr.write(f"== {path.name}\n{text[-1500:]}\n")
        for each in self._alive:
            journal = self._journal(each.pid)
            lines = (
                []
                if journal is None
                else [line for line in journal.lines if line.what not in ("step", "done")]
            )
            sys.stderr.write(f"== {each.pid} {[(line.what, line.facts) for line in lines[-4:]]}\n")

    def _result(self) -> dict[str, Any]:
        self._journals.poll()
        found = account(self._journals.workers)
        ends = [end for each in self._journals.workers if (end := each.ended) is not None]
        models = {end.facts["model"] for end in ends}
        if len(models) > 1:
            self._wrong.append(f"{len(models)} models at the end")
        if not found.right:
            self._wrong.append(f"samples: {found.examples}")
        trains = [line.facts["generation"] for each in self._journals.workers for line in each.of("trains")]
        return {
            "what": "processes",
            "strategy": self.strategy,
            "seed": self.seed,
            "faults": sum(self._counts.values()),
            "runs": 1,
            "kinds": dict(self._counts),
            "generations": max(trains, default=0),
            "epochs": found.epochs,
            "samples": [found.samples, found.doubled, found.missing, found.again],
            "readings": self._readings,
            "wrong": self._wrong,
        }


def _newest(journal: WorkerJournal | None) -> tuple[int, int] | None:
    """The generation a worker has last made a step in, and its size."""
    if journal is None:
        return None
    place, stepped = None, False
    for line in reversed(journal.lines):
        stepped = stepped or line.what == "done"
        if line.what == "trains":
            place = line.facts["generation"], line.facts["world_size"]
            break
        if line.what == "adopted" and not stepped:
            return None
    return place if stepped else None


def read_open(pid: int) -> dict[str, int]:
    """What a process has open."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
        "kib": int(status["VmRSS"].split()[0]),
    }
