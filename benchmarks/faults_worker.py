"""A worker of `benchmarks.faults`: a small training in the style of a user's script, and one fault in it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from benchmarks.faults_trials import CUTS, HOSTS_PER_SITE, Trial
from thinwire.engine.link import Link
from thinwire.errors import PeerError
from thinwire.strategies.registry import from_text
from thinwire.wire.work import Work

PAUSE_S = 0.002
"""In every step, so that survivors who wait for nobody do not use up the processor."""


def note(log: Path, what: str, **facts: Any) -> None:
    """Append an event; read after the trial, whatever has become of this process."""
    with log.open("a") as file:
        file.write(json.dumps({"what": what, "at_s": time.monotonic(), **facts}) + "\n")


class Fault:
    """Happens once, in one worker, at its place and step."""

    def __init__(self, trial: Trial, rank: int, host: Connection[Any, Any], log: Path) -> None:
        self._trial, self._host, self._log = trial, host, log
        self._armed = rank == trial.victim
        self.step = 0

    def at(self, phase: str) -> None:
        trial = self._trial
        due = phase == "before attach" or self.step == trial.step
        if not (self._armed and phase == trial.phase and due):
            return
        self._armed = False
        if trial.kind in CUTS:
            own = trial.hosts[trial.victim]
            place = f"site={own // HOSTS_PER_SITE}" if trial.kind == "partition" else f"host={own}"
            lasts = f",seconds={trial.seconds}" if trial.kind == "link down and up" else ""
            self._ask(f"cut:{place}{lasts}")
            note(self._log, "fault")
            return
        if trial.kind == "stop and continue":
            self._ask(f"continue:{trial.seconds}")
        note(self._log, "fault")
        if trial.kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif trial.kind.startswith("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif trial.kind == "exception":
            raise ArithmeticError("the batch was bad")
        elif trial.kind == "sys.exit":
            sys.exit(3)
        elif trial.kind == "os._exit":
            os._exit(4)
        elif trial.kind == "fewer steps":
            raise StopIteration

    def _ask(self, what: str) -> None:
        self._host.send(what)
        self._host.recv()


class Net(nn.Module):
    """A small network with a place for faults in forward and backward."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self._fault = fault

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self._fault.at("forward")
        x = self.second(x).relu()
        if x.requires_grad:
            x.register_hook(lambda _: self._fault.at("backward"))
        return self.third(x)  # type: ignore[no-any-return]


def run(trial: Trial, rank: int, host: Connection[Any, Any], log: Path) -> None:
    """What the script of one worker does; the exit code is that of its interpreter."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    sys.unraisablehook = partial(_note_late_error, log)
    try:
        _train(trial, Fault(trial, rank, host, log), rank, log)
    except PeerError as error:
        _note_error(log, error)
        if trial.style == "finally":
            sys.exit(7)
        raise
    except BaseException as error:
        _note_error(log, error)
        raise
    note(log, "done")


def _train(trial: Trial, fault: Fault, rank: int, log: Path) -> None:
    if trial.phase == "before attach" or rank % 2 == trial.number % 2:  # otherwise attach starts the group
        dist.init_process_group("gloo")
    if trial.phase == "before attach":
        _wait_for_groups(trial, rank, log)
    fault.at("before attach")
    model = Net(fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: fault.at("optimizer step"))
    link = tw.attach(model, optimizer, from_text(trial.strategy))
    note(log, "attached")
    if trial.phase == "in detach":
        _act_in_detach(link, fault)
    loop = partial(_loop, trial, fault, model, optimizer, link, log)
    if trial.style == "with":
        with link:
            loop()
    elif trial.style == "finally":
        try:
            loop()
        finally:
            link.detach()
    else:
        loop()
        _kept.append(link)  # or it would end here, and not at exit


_kept: list[Link] = []


def _wait_for_groups(trial: Trial, rank: int, log: Path) -> None:
    """Until all have started theirs, which is torch's business."""
    started = [log.with_name(f"{trial.number}-{each}.started") for each in trial.ranks]
    started[rank].touch()
    while rank == trial.victim and not all(path.exists() for path in started):
        time.sleep(0.01)


def _act_in_detach(link: Link, fault: Fault) -> None:
    """Between the last round and the moment when workers leave together."""
    leave = link._core.leaving

    def fault_and_leave() -> Iterator[Work]:
        fault.at("in detach")
        return leave()

    link._core.leaving = fault_and_leave  # type: ignore[method-assign]


def _loop(
    trial: Trial, fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, log: Path
) -> None:
    loss = nn.CrossEntropyLoss()
    try:
        with ExitStack() as stack:
            saves: Callable[[int], None] = lambda step: None  # noqa: E731
            if trial.phase == "saving":
                folder = log.parent / f"{trial.number}-checkpoints"
                checkpoint = tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer)
                saves = stack.enter_context(checkpoint).save
            while fault.step < trial.num_steps:
                optimizer.zero_grad()
                loss(model(torch.randn(8, 64)), torch.randint(10, (8,))).backward()
                optimizer.step()
                fault.step += 1
                if fault.step % 4 == 0 or fault.step == trial.step:
                    saves(fault.step)
                fault.at("saving")
                time.sleep(PAUSE_S)
            fault.at("before detach")
    except StopIteration:
        pass
    except BaseException as error:
        _note_error(log, error)  # when it leaves the loop: what follows is leaving
        raise


def _note_late_error(log: Path, unraisable: Any) -> None:
    """In a script without `detach`, which has ended: the interpreter only prints it."""
    sys.__unraisablehook__(unraisable)
    if unraisable.exc_value is not None:
        _note_error(log, unraisable.exc_value)


def _note_error(log: Path, error: BaseException) -> None:
    if getattr(error, "_noted", False):
        return
    error._noted = True  # type: ignore[attr-defined]
    text = str(error).split("\n", 1)[0][:200]
    note(log, "error", type=type(error).__name__, rank=getattr(error, "rank", None), text=text)
