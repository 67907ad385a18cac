"""Feed the command line, and the readers behind it, with thousands of odd inputs.

    python -m benchmarks.fuzz --count 5000

Everything runs in this process, one input after another, each with a time limit. Nothing heavy starts:
functions that would train, measure or create a lab are replaced by ones that only note they were reached.
Right is an exit code of 1 or 2 with an error in words, or 0 where the input is valid; from functions, a
ThinwireError or a result. The same seed gives the same inputs.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

import thinwire as tw
from benchmarks.common import note, parser_of, print_head, print_row, result_file
from benchmarks.fuzz_inputs import (
    NETS,
    NUMBERS,
    ODD,
    RATES,
    TIMES,
    command_line,
    damage_one,
    fault_text,
    strategy_text,
    varied,
)
from thinwire.cli import main as run_command
from thinwire.errors import ThinwireError
from thinwire.event_log import EventWriter
from thinwire.events import Evaluated, Progress, RunEnded, RunStarted, Summary
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import parse_counts, parse_duration
from thinwire.lab.nets import parse_net
from thinwire.strategies import registry as strategies

LIMIT_S = 20.0
TELL_S = 10.0
"""Seconds between two lines of progress."""
MEMORY_BYTES = 6 << 30
"""Beyond what this process has at first; a demand for more ends in a MemoryError."""
DRAWN_SHARE = 0.02
"""Share of the reports whose plots are written, which takes seconds."""
STARTS = (
    "thinwire.cli.train.run_local",
    "thinwire.cli.train.work",
    "thinwire.cli.lab.run",
    "thinwire.cli.demo.run",
    "thinwire.cli.chaos.LocalRun",
    "thinwire.cli.chaos.run_in_lab",
    "thinwire.lab.calibrate.run",
    "thinwire.cli.bench.measure",
    "thinwire.recipes.virtual.simulate",
    "thinwire.simulate.sizes.step_times",
)
"""Functions that do the work of a command."""


class Started(BaseException):
    """The work would have begun: the input is valid."""


class TooLong(BaseException):
    """The time limit of one input is over."""


def _start(*_: object, **__: object) -> NoReturn:
    raise Started


@contextmanager
def nothing_starts() -> Iterator[None]:
    """Replace the functions that do the work of commands, and torch's start-up, by notes of being reached."""
    with ExitStack() as patches:
        for place in STARTS:
            patches.enter_context(patch(place, _start))
        patches.enter_context(patch("thinwire.bench.run._no_lab", lambda: None))  # it starts processes
        yield


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong after this long, also out of a system call."""

    def over(*_: object) -> NoReturn:
        raise TooLong

    before = signal.signal(signal.SIGALRM, over)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # that of pytest's own limit


def command_result(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a command; "accepted" or "refused", AssertionError if it says so in another way than it should."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")  # strict, as a terminal is
    error = io.StringIO()
    with redirect_stdout(out), redirect_stderr(error), patch.dict(os.environ, environment or {}):
        try:
            status = run_command(arguments)
        except Started:
            return "accepted"
    assert status in (0, 1, 2), f"exit code {status}"
    assert "Traceback" not in error.getvalue(), error.getvalue()
    assert status == 0 or "error: " in error.getvalue(), f"exit code {status} without an error"
    return "accepted" if status == 0 else "refused"


# -- kinds of input: each makes one from the generator, and returns it in words with a function to try it ----

Case = tuple[object, Callable[[], object]]


def command_lines(draw: random.Random, folder: Path) -> Case:
    words = command_line(draw)
    environment = {}
    if draw.random() < 0.05:
        environment = {name: varied(draw, ["0", "1", "2"]) for name in ("RANK", "WORLD_SIZE")}
    return [environment, *words] if environment else words, lambda: command_result(words, environment)


def host_descriptions(draw: random.Random, folder: Path) -> Case:
    texts: dict[str, Any] = {"hosts": draw.choice([1, 2, 4, 8, 0, -1, 10**9]), "rate": varied(draw, RATES)}
    if draw.random() < 0.4:
        texts |= {"sites": varied(draw, ["2+2", "4+4", "1+3"]), "uplink": varied(draw, RATES)}
    texts["slow"] = [varied(draw, ["1=0.5", "0=1"]) for _ in range(draw.randrange(3))]
    texts["faults"] = [fault_text(draw) for _ in range(draw.randrange(3))]
    others: list[tuple[str, str, Callable[[str], object]]] = [
        ("net", varied(draw, NETS), parse_net),
        ("time", varied(draw, TIMES), lambda text: parse_duration(text, field="time")),
        ("counts", varied(draw, [*NUMBERS, "2..16", "4,8"]), parse_counts),
    ]
    if draw.random() < 0.3:
        name, text, parse = draw.choice(others)
        return f"{name} {text}", lambda: parse(text)
    return texts, lambda: describe(**texts).summary()


def settings(draw: random.Random, folder: Path) -> Case:
    if draw.random() < 0.5:
        text = strategy_text(draw)
        return text, lambda: repr(strategies.from_text(text))
    cls = strategies.load(draw.choice(strategies.names()))
    fields = [setting.name for setting in strategies.describe(_name_of(cls)).settings]
    chosen = {name: draw.choice(ODD) for name in draw.sample(fields, min(len(fields), draw.randint(1, 2)))}

    def build() -> None:
        strategy = cls(**chosen)
        repr(strategy), strategies.resolved(strategy), strategy.advice(100, 4), strategy.period

    return f"{cls.__name__}(**{chosen})", build


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def events(draw: random.Random, folder: Path) -> Case:
    run = shutil.copytree(folder / "run", folder / "damaged")
    done = [damage_one(draw, run) for _ in range(draw.randint(1, 2))]
    draws = draw.random() < DRAWN_SHARE

    def report() -> str:
        with ExitStack() as patches:
            if not draws:
                patches.enter_context(patch("thinwire.report.page.save", lambda plot, folder: ""))
            return command_result(["report", str(run)])

    return f"run: {done}", report


def checkpoints(draw: random.Random, folder: Path) -> Case:
    saved = shutil.copytree(folder / "checkpoints", folder / "damaged")
    if draw.random() < 0.05:  # one that runs code when it is unpickled
        victim = draw.choice(sorted(path for path in saved.rglob("*") if path.is_file()))
        victim.write_bytes(pickle.dumps(_RunsCode(str(folder / "executed"))))
        done = [f"{victim.relative_to(saved)} runs code"]
    else:
        done = [damage_one(draw, saved) for _ in range(draw.randint(1, 2))]

    def load() -> None:
        try:
            with training(saved) as checkpoint:
                checkpoint.load()
        finally:
            executed = folder / "executed"
            found = executed.exists()
            shutil.rmtree(executed, ignore_errors=True)
            assert not found, "loading has run code"

    return f"checkpoint: {done}", load


class _RunsCode:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._path,)


KINDS: dict[str, tuple[float, Callable[[random.Random, Path], Case]]] = {
    "command lines": (0.4, command_lines),
    "host descriptions": (0.2, host_descriptions),
    "strategy settings": (0.2, settings),
    "events": (0.1, events),
    "checkpoints": (0.1, checkpoints),
}
"""With their share of all inputs."""


@contextmanager
def training(folder: Path) -> Iterator[tw.Checkpoint]:
    """A world of one with a small model, and its checkpoints."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    with tw.attach(model, optimizer, tw.TopK()) as link:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint:
            yield checkpoint


def make_originals(folder: Path) -> None:
    """Write a run and a checkpoint, which the cases damage."""
    with training(folder / "checkpoints") as checkpoint:
        checkpoint.save(1)
        checkpoint.save(2)
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    run = folder / "run"
    for rank in range(2):
        with EventWriter(run, rank, clock=lambda: 1.8e9) as writer:
            config = {"recipe": "digits-cnn", "strategy": "gtopk", "settings": {"density": 0.1}, "workers": 2}
            writer.write(RunStarted(config=config, versions={"torch": "2"}, host="h", pid=1, world_size=2))
            for step in (5, 10):
                totals = {"sent_bytes": 9 * step, "exposed_s": 0.1 * step, "train_s": 0.5 * step}
                epochs = {"step": step, "num_steps": 10, "epoch": 1, "num_epochs": 1}
                numbers: Any = {**epochs, **totals, "instruments": {"sparse_s": 0.2, "dense_s": 0.1}}
                writer.write(Progress(loss=1 / step, samples_per_s=9.0, **numbers))
            counts: Any = {"steps": 10, "rounds": 10, "samples": 90, "received_bytes": 90, "messages": 9}
            writer.write(RunEnded(sent_bytes=90, exposed_s=1.0, train_s=5.0, **counts))
            if rank == 0:
                value: Any = {"metric": "accuracy", "value": 0.9, "loss": 0.1, "train_s": 5.0}
                writer.write(Evaluated(step=10, epoch=1, **value))
                about: Any = {key: config[key] for key in ("recipe", "strategy", "settings", "workers")}
                about |= {"epochs": 1, "steps": 10, "target": 0.97, "reached": False, "messages": 18}
                sent: Any = {"sent_bytes": 180, "sent_bytes_per_step": 9.0, "exposed_share": 0.2}
                writer.write(Summary(samples_per_s=18.0, **about, **sent, **value))


def try_one(kind: str, draw: random.Random, folder: Path) -> tuple[object, str]:
    """Make one input and try it; the input, and "accepted", "refused", or what is wrong."""
    case, call = KINDS[kind][1](draw, folder)
    try:
        with time_limit(LIMIT_S):
            result = call()
    except TooLong:
        return case, f"hangs: {LIMIT_S:g} s are over"
    except ThinwireError:
        return case, "refused"
    except (Exception, SystemExit) as error:  # noqa: BLE001  # finding them is the purpose
        last = traceback.extract_tb(error.__traceback__)[-1]
        return case, f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:300]}"
    finally:
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    return case, result if result in ("accepted", "refused") else "accepted"


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder to work in, deep enough for `..`, with nothing that starts and an end to memory."""
    here, limit = Path.cwd(), resource.getrlimit(resource.RLIMIT_AS)
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "a", "b", "c", "d")
        folder.mkdir(parents=True)
        make_originals(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limit[1]))
        os.chdir(folder)
        try:
            with nothing_starts():
                yield folder
        finally:
            os.chdir(here)
            resource.setrlimit(resource.RLIMIT_AS, limit)


def try_many(
    kind: str, count: int, seed: int, folder: Path, wrong: list[dict[str, object]]
) -> tuple[Counter[str], tuple[float, str]]:
    """Try inputs of one kind, adding what went wrong to `wrong`; the counts, and the slowest input."""
    draw = random.Random(f"{seed} {kind}")
    counts, slowest = Counter[str](), (0.0, "")
    told_s = time.monotonic()
    for number in range(count):
        began_s = time.monotonic()
        if began_s > told_s + TELL_S:
            told_s = began_s
            note(f"{kind}: {number:,} of {count:,}, {counts['wrong']} wrong so far")
        faulthandler.dump_traceback_later(5 * LIMIT_S, exit=True)  # no signal ends a loop in C
        case, result = try_one(kind, draw, folder)
        slowest = max(slowest, (time.monotonic() - began_s, repr(case)[:300]))
        right = result in ("accepted", "refused")
        counts[result if right else "wrong"] += 1
        if not right:
            wrong.append({"kind": kind, "number": number, "input": repr(case)[:2000], "result": result})
            note(f"{kind} {number}: {repr(case)[:500]}\n    {result}")
    faulthandler.cancel_dump_traceback_later()
    return counts, slowest


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=5000, help="inputs of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of: " + ", ".join(KINDS))
    arguments = parser.parse_args()
    chosen = [kind for kind in KINDS if kind in arguments.kinds.split(",")]
    total = sum(KINDS[kind][0] for kind in chosen)
    file = result_file("fuzz", trial=arguments.count < 5000)
    wrong: list[dict[str, object]] = []
    found: dict[str, Counter[str]] = {}
    slowest: dict[str, tuple[float, str]] = {}
    print_head("inputs", "tried", "accepted", "refused in words", "traceback or hang", "slowest, s")
    with workplace() as folder:
        for kind in chosen:
            count = round(arguments.count * KINDS[kind][0] / total)
            found[kind], slowest[kind] = try_many(kind, count, arguments.seed, folder, wrong)
            counts = found[kind]
            cells = [counts["accepted"], counts["refused"], counts["wrong"], f"{slowest[kind][0]:.1f}"]
            print_row(kind, counts.total(), *cells)
    raw = {"config": vars(arguments), "counts": found, "wrong": wrong, "slowest": slowest}
    note(f"raw data: {file.save(raw)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
