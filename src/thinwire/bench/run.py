"""Runs a benchmark, one lab per number of workers, and writes its tables; imports no torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.bench import config as configs
from thinwire.bench.config import RUNS, BenchConfig, Study, provenance
from thinwire.bench.plan import Outlook
from thinwire.bench.systems import HOW_TO_GET_RIVALS, choose, family_of, find, load_rivals
from thinwire.bench.tables import AccuracyRow, Table, accuracy_rows, accuracy_table, step_rows, step_tables
from thinwire.errors import DataError, ThinwireError, UsageError
from thinwire.event_log import EventReader, read_events
from thinwire.events import Event, StepTimed
from thinwire.hosts.description import Description, Host
from thinwire.hosts.machine import Machine
from thinwire.lab.nets import parse_net
from thinwire.lab.run import Job, enter_command
from thinwire.lab.run import run as run_lab
from thinwire.recipes import registry
from thinwire.recipes.follow import RunState, explain, follow
from thinwire.recipes.launch import LOG, LocalWorkers
from thinwire.timings import Family

POLL_S = 0.2
MODULE = "thinwire.bench.worker"
LONGEST_BLOCK_S = 600.0
"""Grace period beyond twice the expected time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSetup:
    """The configuration, and what is available on this machine to carry it out."""

    config: BenchConfig
    no_lab: str | None
    """Why this machine cannot run labs; None if it can."""
    no_rivals: str | None
    """Why there are no rivals; None if there are."""
    families: dict[str, Family]
    """By system: the ceiling, ours, or a rival."""
    absent: dict[str, str]
    """Why a system cannot run here, by system."""
    no_data: dict[str, str] = field(default_factory=dict)
    """Why a recipe's data is missing and what to do, by recipe."""

    @property
    def shaped(self) -> bool:
        return self.no_lab is None

    def outlook(self) -> Outlook:
        studies = [study for study in self.config.studies if study.recipe not in self.no_data]
        return Outlook(self.config, self.shaped, 60 * sum(study.minutes for study in studies))


def prepare(config: BenchConfig, systems: list[str] | None) -> BenchSetup:
    """Find out which labs, rivals and data there are; wrong settings are refused here."""
    rivals = load_rivals(config.rivals)
    names = choose(systems, rivals)
    chosen = {name: find(name, rivals) for name in names}
    for net in config.nets:
        # parameters and gradients of every worker; a strategy has copies of its own besides
        num_bytes = 2 * 4 * parse_net(net, scale=config.scale).num_params * max(config.workers, default=0)
        Machine.this().check_memory(num_bytes, "net", net, hint="fewer workers, or --scale 0.1")
    return BenchSetup(
        config=replace(config, systems=tuple(names)),
        no_lab=_no_lab(),
        no_rivals=None if rivals else f"not found: {HOW_TO_GET_RIVALS}",
        families={name: family_of(system) for name, system in chosen.items()},
        absent={name: why for name, system in chosen.items() if (why := system.available()) is not None},
        no_data={study.recipe: why for study in config.studies if (why := _no_data(study)) is not None},
    )


def _no_lab() -> str | None:
    try:
        enter_command()
    except UsageError as problem:
        return problem.message.splitlines()[0]
    return None


def _no_data(study: Study) -> str | None:
    locate = registry.get(study.recipe).locate
    if locate is None:
        return None
    try:
        locate(None if study.data is None else Path(study.data))
    except DataError as problem:
        return f"{problem.message}: {problem.hint}" if problem.hint else problem.message
    return None


Watch = Callable[[Path, Event], object]


def measure(folder: Path, setup: BenchSetup, watch: Watch, begin: Callable[[str, float], object]) -> None:
    """Measure everything into `folder`; `watch` gets every event, `begin` what starts and the seconds left.

    After an error, `folder` holds everything measured until then.
    """
    config, outlook = setup.config, setup.outlook()
    about: dict[str, Any] = {
        "network": "lab" if setup.shaped else f"loopback: {setup.no_lab}",
        "rivals": setup.no_rivals or "found",
        "families": setup.families,
        "absent": setup.absent,
        "no_data": setup.no_data,
        "begin": provenance(),
    }
    configs.write(folder, config, about)
    with following(folder, watch):
        for workers in config.workers:
            begin(f"step time, {workers} workers", outlook.left_s())
            allowed_s = outlook.allowed_s(workers)
            began = time.monotonic()
            _run(folder, workers, setup, ("steps", f"{allowed_s:.0f}"), allowed_s)
            outlook.spent[workers] = time.monotonic() - began
        for number, study in enumerate(config.studies):
            if study.recipe in setup.no_data:
                continue
            begin(f"time to accuracy, {study.recipe}", outlook.left_s())
            _run(folder, study.workers, setup, ("study", str(number)), 60 * study.minutes)
            outlook.studies_s -= 60 * study.minutes
    configs.write(folder, config, {**about, "end": provenance()})


def _run(folder: Path, workers: int, setup: BenchSetup, what: tuple[str, ...], expected_s: float) -> None:
    """Run one set of worker processes to its end."""
    limit_s, failure = 2 * expected_s + LONGEST_BLOCK_S, None
    state, reader = RunState(workers), EventReader(folder)
    if setup.shaped:
        rate = max(setup.config.rates_bits_per_s)
        hosts = tuple(Host(index=index, rate_bit_per_s=rate) for index in range(workers))
        command = ("-m", MODULE, str(folder), *what)
        job = Job(description=Description(hosts=hosts), command=command, time_limit_s=limit_s, prefix=False)
        status = run_lab(job).exit_code
    else:
        with LocalWorkers(folder, workers, module=MODULE, arguments=what) as running:
            status = follow(running, reader, state, limit_s=limit_s)
        failure = running.failure
    if status != 0:
        state.apply(reader.poll())
        raise ThinwireError(
            f"the benchmark ended early: {explain(folder, state, status, failure).message}",
            hint=f"what was measured is kept; the output is in {folder / LOG}",
        )


@contextmanager
def following(folder: Path, watch: Watch) -> Iterator[None]:
    """Hand every new event of the benchmark and of its runs to `watch`, in a separate thread."""
    readers = {folder: EventReader(folder)}
    over = threading.Event()

    def poll() -> None:
        for run in sorted((folder / RUNS).glob("*")):
            readers.setdefault(run, EventReader(run))
        for place, reader in readers.items():
            for event in reader.poll():
                watch(place, event)

    def follow() -> None:
        while not over.wait(POLL_S):
            poll()

    thread = threading.Thread(target=follow, name="thinwire-bench-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        poll()


def write_results(folder: Path, setup: BenchSetup) -> dict[str, list[Table]]:
    """Write the tables of everything measured so far beside the events, as Markdown and as JSON; return them
    by title: one per cell, and one per study."""
    config = setup.config
    timed = [event.record for event in read_events(folder) if isinstance(event.record, StepTimed)]
    steps = step_rows(timed, config.systems)
    trained: list[AccuracyRow] = []
    tables = {"Step time": step_tables(steps), "Time to accuracy": []}
    remark = "" if setup.shaped else " (loopback: no lab here, so rates do not apply)"
    for study in config.studies:
        no_data = setup.no_data.get(study.recipe, "")
        rows = [] if no_data else accuracy_rows(folder, config, study, setup.absent, counted=setup.shaped)
        tables["Time to accuracy"].append(accuracy_table(study, rows, remark, no_data))
        trained += rows
    head = [] if setup.shaped else [f"Measured over loopback, so rates do not apply: {setup.no_lab}"]
    if config.scale != 1:
        head.append(f"Nets and rates are scaled by {config.scale:g}; seconds are not.")
    if setup.no_rivals is not None:
        head.append(f"Rivals: {setup.no_rivals}")
    measured: list[Sequence[Any]] = [steps, trained]
    for (title, found), all_rows in zip(tables.items(), measured, strict=True):
        place = folder / title.lower().replace(" ", "_")
        parts = [f"## {title}", *head, *(table.markdown() for table in found)]
        place.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        content = json.dumps([asdict(row) for row in all_rows], indent=1) + "\n"
        place.with_suffix(".json").write_text(content, encoding="utf-8")
    return tables
