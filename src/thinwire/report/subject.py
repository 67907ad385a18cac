"""Reads the folder that a report is about: one run, several runs, or a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.event_log import FOLDER, EventReader
from thinwire.events import StepTimed
from thinwire.report.runs import Run, make_run, read_json, read_list
from thinwire.timings import CEILING, FAMILIES, Family, Timing, timings
from thinwire.units import count

RUNS = "runs"
"""The part of a bench folder that holds its trainings."""
NAMED = ("workers", "seed", "epochs", "clock")
"""Settings that distinguish runs of the same system."""
AIM = {"recipe": str, "target": float}
STUDY = {"recipe": str, "workers": int, "rate_bits_per_s": float}
_HOST = {"load_average": [float], "commit": str, "changed_files": [object], "command": [str], "cores": int}
BENCH_FACTS = {"config": {"studies": [STUDY]}, "begin": _HOST, "end": _HOST, "families": Mapping[str, Family]}
"""Entries of bench.json that are read, with their types."""
MOST_NAMED = 3
"""Damaged lines that are named; more are counted."""
PART_OF_SYSTEM = ("batch_size", "device")
"""Settings that count as part of the system, like those of its strategy."""


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The value of the test metric that runs aim at."""

    metric: str
    value: float
    lower_is_better: bool

    def seconds(self, run: Run) -> float | None:
        """Seconds of training until the metric was first as good; None if it never was."""
        sign = -1 if self.lower_is_better else 1
        return next((at_s for at_s, value in run.values() if sign * value >= sign * self.value), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of one recipe."""

    runs: Sequence[Run]

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe

    @property
    def seconds(self) -> str:
        """The unit of the runs' clocks."""
        units = {run.seconds for run in self.runs}
        return units.pop() if len(units) == 1 else "real and virtual seconds"

    @property
    def metric(self) -> str:
        return next((run.evaluated[0].metric for run in self.runs if run.evaluated), "value")

    @property
    def target(self) -> RunTarget | None:
        """The target of the runs; None until one of them has finished.

        A benchmark that trains a recipe for a shorter time has its own target. Whether lower is better is not
        recorded: it follows from the summaries, each of which says whether its value reached the target.
        """
        finished = [(run.aim, run.summary) for run in self.runs if run.summary is not None]
        if not finished:
            return None
        aim, first = finished[0]
        lower_is_better = any(
            (s.value < first.target) == s.reached
            for _, s in finished
            if s.value is not None and s.value != first.target
        )
        return RunTarget(first.metric, first.target if aim is None else aim, lower_is_better)

    @property
    def competing(self) -> Sequence[Run]:
        """The runs without the ceiling, which trains worse."""
        return [run for run in self.runs if run.family != "ceiling"] or self.runs

    def reached(self) -> list[tuple[float, str]]:
        """Seconds to the target and labels of the competing runs that reached it, the fastest first."""
        target = self.target
        times = [(target.seconds(run), run.label) for run in self.competing] if target else []
        return sorted((seconds, label) for seconds, label in times if seconds is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Everything that a report shows."""

    folder: Path
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The content of bench.json."""
    is_bench: bool
    timings: Sequence[Timing]
    """Step times of the benchmark; without one, of the runs."""
    runs: Sequence[Run]
    damage: Sequence[str]
    """Lines and files of events that could not be read, by name and number."""
    notes: Sequence[str]
    """Folders that were left out, with the reason."""

    @property
    def only_run(self) -> Run | None:
        """The run, if the page is about one run and nothing else."""
        return self.runs[0] if len(self.runs) == 1 and not self.is_bench else None

    @property
    def comparisons(self) -> list[Comparison]:
        """The runs by recipe, in the order of the folders."""
        recipes = dict.fromkeys(run.recipe for run in self.runs)
        return [Comparison([run for run in self.runs if run.recipe == recipe]) for recipe in recipes]


def read_subject(folder: Path) -> Subject:
    """Read whatever the folder holds; DataError says what is wrong if that is nothing."""
    _check(folder)
    own, blocks, damage = _read(folder)
    runs, notes = [own] if own is not None else [], []
    below = [folder / RUNS] if blocks else [folder, folder / RUNS]
    for child in sorted(path.parent for place in below for path in place.glob(f"*/{FOLDER}/")):
        run, inside, damaged = _read(child)
        damage += [f"{child.name}/{place}" for place in damaged]
        if run is not None:
            runs.append(run)
        elif inside:
            notes.append(f"{child.name} is a benchmark with a page of its own: thinwire report {child}")
        else:
            notes.append(f"{child.name} was left out: {_nothing(damaged)}")
    if not runs and not blocks:
        raise DataError(
            f"no run to report on in {folder}: " + ("; ".join(notes) or _nothing(damage)),
            hint="name the folder that a command calls its results, or one that holds several of these",
        )
    facts = read_json(folder / "bench.json", BENCH_FACTS)
    families: dict[str, Family] = facts.get("families", {}) | {block.system: block.family for block in blocks}
    rows = read_list(folder / "time_to_accuracy.json", AIM)
    aims = {row["recipe"]: row["target"] for row in rows if AIM.keys() <= row.keys()}
    named = sorted(_named(runs, families, aims), key=lambda run: FAMILIES.index(run.family))
    return Subject(
        folder=folder,
        facts=facts,
        is_bench=bool(blocks),
        timings=timings(blocks) if blocks else timings_of(named),
        runs=named,
        damage=damage,
        notes=notes,
    )


def _read(folder: Path) -> tuple[Run | None, list[StepTimed], list[str]]:
    """The run in a folder, the blocks of a benchmark, and the lines that could not be read."""
    reader = EventReader(folder)
    events = reader.poll()
    blocks = [event.record for event in events if isinstance(event.record, StepTimed)]
    return make_run(folder, events), blocks, reader.damage


def _check(folder: Path) -> None:
    if not folder.exists():
        raise DataError(f"DIR must be a folder with the events of a run, {folder} does not exist")
    if not folder.is_dir() or folder.name == FOLDER:
        run = folder.parent.parent if folder.parent.name == FOLDER else folder.parent
        raise DataError(f"DIR must be the folder of a run, got {folder}", hint=f"thinwire report {run}")


def _nothing(damage: Sequence[str]) -> str:
    if damage:
        return f"{damaged_lines(damage)}, and there are no others"
    return f"there are no events ({FOLDER}/worker-*.jsonl)"


def damaged_lines(damage: Sequence[str]) -> str:
    """A text on how many lines could not be read, and where the first ones are."""
    first = ", ".join(damage[:MOST_NAMED]) + (", ..." if len(damage) > MOST_NAMED else "")
    return f"{count(len(damage), 'line')} of events could not be read ({first})"


def _named(runs: Sequence[Run], families: Mapping[str, Family], aims: Mapping[str, float]) -> Iterable[Run]:
    """Give each run the shortest name that tells it apart from the others of its recipe."""
    for run in runs:
        peers = [other for other in runs if other.recipe == run.recipe]
        configs = [other.config for other in peers]
        alike = [other.settings for other in peers if other.strategy == run.strategy]
        words = _differing(run.settings, alike, run.settings)
        words += _differing(run.config, configs, PART_OF_SYSTEM)
        system = _timed_as(run, families) or ":".join([run.strategy, *words])
        label = ", ".join([system, *_differing(run.config, configs, NAMED)])
        names = ("strategy", "settings", *NAMED, *PART_OF_SYSTEM)
        twins = [c for c in configs if all(c.get(name) == run.config.get(name) for name in names)]
        yield replace(
            run,
            aim=aims.get(run.recipe),
            system=system,
            family=families.get(system, "ceiling" if run.strategy == CEILING else "ours"),
            label=f"{label} ({run.folder.name})" if len(twins) > 1 else label,
        )


def _timed_as(run: Run, systems: Iterable[str]) -> str | None:
    """The system of the benchmark that trained this run: the one that says most about its settings."""
    pairs = {f"{name}={value}".lower() for name, value in run.settings.items()}  # `true` is True
    parts = {name: name.removeprefix(run.strategy) for name in systems if name.startswith(run.strategy)}
    fitting = [
        name
        for name, rest in parts.items()
        if not rest or (rest.startswith(":") and pairs.issuperset(rest[1:].lower().split(":")))
    ]
    return max(fitting, key=lambda name: name.count(":"), default=None)


def _differing(own: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """The values in which `own` differs from any of the others, in words."""
    differing = [n for n in names if n in own and len({str(other.get(n)) for other in peers}) > 1]
    return [count(own[n], "worker") if n == "workers" else f"{n}={own[n]}" for n in differing]


def timings_of(runs: Iterable[Run]) -> list[Timing]:
    """The steps of whole runs, spread over runs of the same system; efficiency where the ceiling ran too."""
    found = timings(
        StepTimed(
            system=run.system,
            family=run.family,
            workers=run.world_size,
            rate_bits_per_s=None,
            net=run.recipe,
            turn=0,
            step_s=run.per_step("train_s"),
            compute_s=run.per_step("train_s") - run.per_step("exposed_s"),
            exposed_s=None if run.family == "rival" else run.per_step("exposed_s"),
            sent_bytes=run.per_step("sent_bytes"),
            emulated=False,
        )
        for run in runs
        if run.per_step("train_s") > 0
    )
    ceilings = {timing.cell: timing.median_s for timing in found if timing.family == "ceiling"}
    # a rival does not report its waiting
    return [
        replace(t, compute_s=ceilings.get(t.cell, t.compute_s)) if t.family == "rival" else t for t in found
    ]
