"""Runs a benchmark from outside: one lab per number of workers, events as they come; no torch of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.bench import config as configs
from thinwire.bench.config import RUNS, BenchConfig, Study
from thinwire.bench.plan import Outlook
from thinwire.bench.provenance import provenance
from thinwire.bench.systems import HOW_TO_GET_RIVALS, Family, choose, family_of, find, load_rivals
from thinwire.errors import DataError, ThinwireError, UsageError
from thinwire.events import Event, EventReader, Failed, read_events
from thinwire.hosts.description import Description, Host
from thinwire.lab.job import Job
from thinwire.lab.namespaces import enter_command
from thinwire.lab.run import run as run_lab
from thinwire.recipes import registry
from thinwire.recipes.launch import LOG, LocalWorkers

POLL_S = 0.2
MODULE = "thinwire.bench.worker"
LONGEST_BLOCK_S = 600.0
"""On top of twice the time it should take, a part may take this long before it is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What was found before anything was measured."""

    config: BenchConfig
    no_lab: str | None
    """Why labs cannot be made here; None if they can."""
    no_rivals: str | None
    """Why there are none."""
    families: dict[str, Family]
    """What each system is: the ceiling, ours, or a rival."""
    absent: dict[str, str]
    """Systems that cannot run here, and why."""
    no_data: dict[str, str] = field(default_factory=dict)
    """Recipes whose data is missing, and what to do."""

    @property
    def shaped(self) -> bool:
        return self.no_lab is None

    def outlook(self) -> Outlook:
        """How long it will take."""
        studies = [study for study in self.config.studies if study.recipe not in self.no_data]
        return Outlook(self.config, self.shaped, 60 * sum(study.minutes for study in studies))


def prepare(config: BenchConfig, systems: list[str] | None) -> Setting:
    """Look at what is there: labs, rivals, data. Wrong settings are refused here."""
    rivals = load_rivals(config.rivals)
    names = choose(systems, rivals)
    config = replace(config, systems=tuple(names))
    systems_by_name = {name: find(name, rivals) for name in names}
    reasons = {name: system.available() for name, system in systems_by_name.items()}
    return Setting(
        config=config,
        no_lab=_no_lab(),
        no_rivals=None if rivals else f"not found: {HOW_TO_GET_RIVALS}",
        families={name: family_of(system) for name, system in systems_by_name.items()},
        absent={name: reason for name, reason in reasons.items() if reason is not None},
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


def measure(folder: Path, setting: Setting, watch: Watch, begin: Callable[[str, float], object]) -> None:
    """Measure everything into `folder`; `watch` sees every event, `begin` what starts and the seconds left.

    An error leaves behind what was measured until then.
    """
    config, outlook = setting.config, setting.outlook()
    about: dict[str, Any] = {
        "network": "lab" if setting.shaped else f"loopback: {setting.no_lab}",
        "rivals": setting.no_rivals or "found",
        "families": setting.families,
        "absent": setting.absent,
        "no_data": setting.no_data,
        "begin": provenance(),
    }
    configs.write(folder, config, about)
    with following(folder, watch):
        for workers in config.workers:
            begin(f"step time, {workers} workers", outlook.left_s())
            allowed_s = outlook.allowed_s(workers)
            began = time.monotonic()
            _run(folder, workers, setting, ("steps", f"{allowed_s:.0f}"), allowed_s)
            outlook.spent(workers, time.monotonic() - began)
        for number, study in enumerate(config.studies):
            if study.recipe in setting.no_data:
                continue
            begin(f"time to accuracy, {study.recipe}", outlook.left_s())
            _run(folder, study.workers, setting, ("study", str(number)), 60 * study.minutes)
            outlook.studies_s -= 60 * study.minutes
    configs.write(folder, config, {**about, "end": provenance()})


def _run(folder: Path, workers: int, setting: Setting, what: tuple[str, ...], expected_s: float) -> None:
    """One set of processes, from start to end."""
    limit_s = 2 * expected_s + LONGEST_BLOCK_S
    if setting.shaped:
        rate = max(setting.config.rates_bits_per_s)
        hosts = tuple(Host(index=index, rate_bit_per_s=rate) for index in range(workers))
        command = ("-m", MODULE, str(folder), *what)
        job = Job(description=Description(hosts=hosts), command=command, time_limit_s=limit_s, prefix=False)
        status = run_lab(job).exit_code
    else:
        status = _run_local(folder, workers, what, limit_s)
    if status != 0:
        raise explained(folder, status)


def _run_local(folder: Path, workers: int, what: tuple[str, ...], limit_s: float) -> int:
    until = time.monotonic() + limit_s
    with LocalWorkers(folder, workers, module=MODULE, arguments=what) as running:
        while (status := running.poll()) is None:
            if time.monotonic() > until:
                return 124
            time.sleep(POLL_S)
    return status


def explained(folder: Path, status: int) -> ThinwireError:
    """Why the workers ended early, as far as they have told."""
    failures = [event for event in read_events(folder) if isinstance(event.record, Failed)]
    causes = [event.record for event in failures if isinstance(event.record, Failed)]
    first = next((cause for cause in causes if not cause.consequence), causes[0] if causes else None)
    said = f"{first.error}: {first.message}" if first else f"exit code {status}"
    return ThinwireError(
        f"the benchmark ended early: {said}",
        hint=f"what was measured is kept; the output is in {folder / LOG}",
    )


@contextmanager
def following(folder: Path, watch: Watch) -> Iterator[None]:
    """Hand every new event of the benchmark and of its runs to `watch`, from a thread of its own."""
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
