"""What a folder holds: one run, several, or a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.events import FOLDER, EventReader, StepTimed
from thinwire.report.reading import make_run, read_aims, read_json
from thinwire.report.runs import Run
from thinwire.report.timings import FAMILIES, Cell, Family, Timing, timings
from thinwire.spread import Spread
from thinwire.units import count

BENCH = "bench.json"
ACCURACY = "time_to_accuracy.json"
"""Where it says what they aim at."""
RUNS = "runs"
"""Where a benchmark keeps its trainings."""
CEILING = "silent"
NAMED = ("workers", "seed", "epochs", "clock")
"""What tells two runs of the same system apart."""
PART_OF_SYSTEM = ("batch_size", "device")
"""What makes it another system, beside the settings of the strategy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRun:
    """A run with its place among others."""

    run: Run
    system: str
    """The strategy, with the settings in which it differs from other runs: `all-reduce:overlap=forward`."""
    family: Family
    label: str
    """The system, and what tells this run apart from others of the same system."""

    @property
    def exposed_share(self) -> float | None:
        """Part of the training time spent waiting for the wire; rivals do not tell."""
        return None if self.family == "rival" else self.run.exposed_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """All that a page is about."""

    folder: Path
    facts: Mapping[str, Any] = field(default_factory=dict)
    """bench.json as it is."""
    blocks: tuple[StepTimed, ...] = ()
    timings: tuple[Timing, ...] = ()
    """Of the benchmark, or of the runs where there is none."""
    trainings: tuple[NamedRun, ...] = ()
    skipped: int = 0
    """Lines of event files that could not be read."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def is_bench(self) -> bool:
        """Whether steps were timed on purpose, not only in passing."""
        return bool(self.blocks)

    def of_recipe(self, recipe: str) -> list[NamedRun]:
        """The runs that can be compared with each other."""
        return [training for training in self.trainings if training.run.recipe == recipe]

    @property
    def recipes(self) -> list[str]:
        """What was trained, in the order of the folders."""
        return list(dict.fromkeys(training.run.recipe for training in self.trainings))


def read_subject(folder: Path) -> Subject:
    """Read whatever the folder holds; DataError says what is wrong if that is nothing."""
    _check(folder)
    reader = EventReader(folder)
    events = reader.poll()
    skipped = reader.skipped
    blocks = [event.record for event in events if isinstance(event.record, StepTimed)]
    found = [make_run(folder, events, skipped)]
    notes: list[str] = []
    below = [folder / RUNS] if blocks else [folder, folder / RUNS]
    for child in sorted(child for place in below if place.is_dir() for child in place.iterdir()):
        if not (child / FOLDER).is_dir():
            continue
        reader = EventReader(child)
        inside = reader.poll()
        skipped += reader.skipped
        run = make_run(child, inside, reader.skipped)
        found.append(run)
        if run is None and any(isinstance(event.record, StepTimed) for event in inside):
            notes.append(f"{child.name} is a benchmark with a page of its own: thinwire report {child}")
        elif run is None:
            notes.append(f"{child.name} was left out: {_nothing(reader.skipped)}")
    aims = read_aims(folder / ACCURACY)
    runs = [replace(run, aim=aims.get(run.recipe)) for run in found if run is not None]
    if not runs and not blocks:
        raise DataError(
            f"no run to report on in {folder}: " + ("; ".join(notes) or _nothing(skipped)),
            hint="name the folder that a command calls its results, or one that holds several of these",
        )
    facts = read_json(folder / BENCH)
    families: dict[str, Family] = {
        name: family for name, family in dict(facts.get("families") or {}).items() if family in FAMILIES
    }
    families |= {block.system: block.family for block in blocks}
    named = sorted(name_runs(runs, families), key=lambda training: FAMILIES.index(training.family))
    return Subject(
        folder=folder,
        facts=facts,
        blocks=tuple(blocks),
        timings=tuple(timings(blocks) if blocks else timings_of(named)),
        trainings=tuple(named),
        skipped=skipped,
        notes=tuple(notes),
    )


def _check(folder: Path) -> None:
    if not folder.exists():
        raise DataError(f"DIR must be a folder with the events of a run, {folder} does not exist")
    if not folder.is_dir() or folder.name == FOLDER:
        run = folder.parent.parent if folder.parent.name == FOLDER else folder.parent
        raise DataError(f"DIR must be the folder of a run, got {folder}", hint=f"thinwire report {run}")


def _nothing(skipped: int) -> str:
    if skipped:
        return f"{count(skipped, 'line')} of events, and none could be read"
    return f"there are no events ({FOLDER}/worker-*.jsonl)"


def name_runs(runs: Sequence[Run], families: Mapping[str, Family]) -> Iterable[NamedRun]:
    """Give each run the shortest name that tells it apart from the others of its recipe."""
    for run in runs:
        peers = [other for other in runs if other.recipe == run.recipe]
        system = _timed_as(run, families) or _system(run, peers)
        rest = [
            _words(name, run.config[name])
            for name in NAMED
            if name in run.config and len({str(other.config.get(name)) for other in peers}) > 1
        ]
        label = ", ".join([system, *rest])
        twins = [other for other in peers if other is not run and _same(other, run)]
        yield NamedRun(
            run=run,
            system=system,
            family=families.get(system, "ceiling" if run.strategy == CEILING else "ours"),
            label=f"{label} ({run.folder.name})" if twins else label,
        )


def _timed_as(run: Run, systems: Iterable[str]) -> str | None:
    """The system of the benchmark that trained this run: the one that says most about its settings."""
    pairs = {f"{name}={value}".lower() for name, value in run.settings.items()}  # `true` is True
    fitting = [
        name
        for name in systems
        if name.split(":")[0] == run.strategy and pairs.issuperset(name.lower().split(":")[1:])
    ]
    return max(fitting, key=lambda name: name.count(":"), default=None)


def _system(run: Run, peers: Sequence[Run]) -> str:
    same = [other for other in peers if other.strategy == run.strategy]
    words = [
        f"{name}={value}"
        for name, value in run.settings.items()
        if len({str(other.settings.get(name)) for other in same}) > 1
    ]
    words += [
        _words(name, run.config[name])
        for name in PART_OF_SYSTEM
        if name in run.config and len({str(other.config.get(name)) for other in peers}) > 1
    ]
    return ":".join([run.strategy, *words])


def _same(one: Run, other: Run) -> bool:
    names = ("strategy", "settings", *NAMED, *PART_OF_SYSTEM)
    return all(one.config.get(name) == other.config.get(name) for name in names)


def _words(name: str, value: object) -> str:
    return count(value, "worker") if name == "workers" and isinstance(value, int) else f"{name}={value}"


def timings_of(trainings: Sequence[NamedRun]) -> list[Timing]:
    """The steps of whole runs, spread over runs of the same system; efficiency where the ceiling ran too."""
    groups: dict[tuple[str, Cell], list[NamedRun]] = {}
    for training in trainings:
        if training.run.step_s > 0:
            cell = Cell(training.run.recipe, None, training.run.world_size)
            groups.setdefault((training.system, cell), []).append(training)
    step_s = {key: Spread.of([t.run.step_s for t in group]) for key, group in groups.items()}
    ceilings = {
        cell: step_s[system, cell].median
        for (system, cell), group in groups.items()
        if group[0].family == "ceiling"
    }
    return [
        Timing(
            system=system,
            family=group[0].family,
            cell=cell,
            step_s=step_s[system, cell],
            efficiency=_efficiency(group, ceilings.get(cell)),
            compute_s=_compute_s(group, ceilings.get(cell)),
            exposed_s=None
            if group[0].family == "rival"
            else _mean([t.run.exposed_s_per_step for t in group]),
            sent_bytes=_mean([t.run.sent_bytes_per_step for t in group]),
        )
        for (system, cell), group in groups.items()
    ]


def _compute_s(group: Sequence[NamedRun], ceiling_s: float | None) -> float:
    """Of a rival, which does not tell its waiting, as much as the ceiling took."""
    if group[0].family == "rival" and ceiling_s is not None:
        return ceiling_s
    return _mean([t.run.step_s - t.run.exposed_s_per_step for t in group])


def _efficiency(group: Sequence[NamedRun], ceiling_s: float | None) -> Spread | None:
    return None if ceiling_s is None else Spread.of([ceiling_s / t.run.step_s for t in group])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
