"""The report of a run under faults: what happened, who noticed it when, what was lost, and what was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.chaos.journals import Line, WorkerJournal
from thinwire.chaos.outcome import Outcome, Struck
from thinwire.chaos.samples import SampleAccount, account

_EARLY_S = 0.05
"""Workers may notice a fault before whoever causes it has looked at the clock."""


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one fault."""

    at_s: float
    """Since the workers were started."""
    fault: str
    noticed_by: int = 0
    """How many other workers missed the victim."""
    how: str = ""
    noticed_s: float | None = None
    """From the fault until the last of them noticed."""
    generation: int | None = None
    """The first without the victim, or with whoever joins."""
    workers: int = 0
    """In it."""
    resumed_s: float | None = None
    """From the fault until all of these have made a step."""


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    faults: tuple[Told, ...]
    samples: SampleAccount
    wrong: tuple[str, ...]
    """In words; empty if all is well."""
    seconds: float
    steps: int
    generations: int
    models: int
    """Different ones at the end."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(outcome: Outcome) -> Report:
    """What happened, and what was wrong."""
    workers = [each for each in outcome.journals.workers if each.lines]
    told = tuple(_tell(struck, outcome, workers) for struck in outcome.struck if not struck.ends)
    samples = account(workers)
    ends = [each.ended for each in workers if each.ended is not None]
    last = max((end.facts["generation"] for end in ends), default=0)
    models = {end.facts["model"] for end in ends if end.facts["generation"] == last}
    wrong = [*_wrong_ends(outcome), *_never_resumed(told)]
    if not samples.right:
        wrong.append("samples: " + "; ".join(samples.examples))
    if len(models) > 1:
        wrong.append(f"the workers ended with {len(models)} different models")
    generations = max((line.facts["generation"] for each in workers for line in each.of("trains")), default=0)
    steps = max((line.facts["steps"] for each in workers for line in each.of("done")), default=-1) + 1
    return Report(told, samples, tuple(wrong), outcome.seconds, steps, generations, len(models))


def _wrong_ends(outcome: Outcome) -> list[str]:
    wrong = []
    for each in outcome.ended:
        if each.code is None and not each.planned:
            wrong.append(f"worker {each.host} had not ended when the time was up")
        elif each.code and not each.planned:
            wrong.append(
                f"worker {each.host} ended with status {each.code}; see its output in {outcome.folder}"
            )
    if all(each.planned or each.code for each in outcome.ended):
        wrong.append("no worker trained to the end")
    return wrong


def _never_resumed(told: Sequence[Told]) -> list[str]:
    return [
        f"after {each.fault} at {each.at_s:.1f} s nobody of generation {each.generation} made a step"
        for each in told
        if each.generation is not None and each.resumed_s is None and each.workers
    ]


def _tell(struck: Struck, outcome: Outcome, workers: Sequence[WorkerJournal]) -> Told:
    fault, at = struck.fault, struck.at
    shown, at_s = str(fault), at - outcome.began
    if fault.kind in ("slow", "heal"):
        return Told(at_s, shown)
    if fault.kind == "rejoin":
        return _tell_join(struck, at_s, workers)
    victims = outcome.victims(fault)
    last = {w.host: w for w in workers if w.host in victims and w.lines[0].at < at}
    before, others = list(last.values()), [w for w in workers if w.host not in victims]
    ids = set[str]().union(*(w.ids for w in before))
    missed: dict[int, Line] = {}
    until = at + (fault.seconds or 1e9) + 5.0
    for other in others:
        for line in other.of("missed"):
            if line.facts["id"] in ids and at - _EARLY_S <= line.at <= until:
                missed.setdefault(other.pid, line)
    if not missed:
        was_in = any(line.at < at for w in before for line in w.of("trains"))
        how = "forgiven" if fault.kind != "kill" else "the run was over" if was_in else "it was not in"
        return Told(at_s, shown, how=how)
    adopted = [
        line
        for other in others
        for line in other.of("adopted")
        if line.at >= at - _EARLY_S and not ids & set(line.facts["ids"]) and line.at <= until + 30
    ]
    how = ", ".join(sorted({str(line.facts["how"]) for line in missed.values()}))
    noticed_s = max(line.at for line in missed.values()) - at
    generation, size, resumed_s = _resumed(adopted, at, workers)
    return Told(at_s, shown, len(missed), how, noticed_s, generation, size, resumed_s)


def _tell_join(struck: Struck, at_s: float, workers: Sequence[WorkerJournal]) -> Told:
    after = [w for w in workers if w.host == struck.fault.host and w.lines[0].at >= struck.at - _EARLY_S]
    if not after:
        return Told(at_s, str(struck.fault), how="never came up")
    adopted = list(after[0].of("adopted"))
    if not adopted:
        return Told(at_s, str(struck.fault), how="was never taken in")
    generation, size, resumed_s = _resumed(adopted, struck.at, workers)
    return Told(at_s, str(struck.fault), 0, "joined", None, generation, size, resumed_s)


def _resumed(
    adopted: Sequence[Line], at: float, workers: Sequence[WorkerJournal]
) -> tuple[int | None, int, float | None]:
    """The first generation that followed and was trained in, its size, and when all had made a step."""
    firsts: dict[int, dict[int, float]] = {}
    sizes: dict[int, int] = {}
    for worker in workers:
        for line in worker.lines:
            if line.what == "trains":
                sizes[line.facts["generation"]] = line.facts["world_size"]
            elif line.what == "done":
                firsts.setdefault(line.facts["generation"], {}).setdefault(worker.pid, line.at)
    first = min((line.facts["generation"] for line in adopted), default=None)
    if first is None:
        return None, 0, None
    for generation in sorted(sizes):
        made = firsts.get(generation, {})
        if generation >= first and len(made) == sizes[generation]:
            return generation, sizes[generation], max(made.values()) - at
    ended = any(worker.ended is not None for worker in workers)
    return first, 0 if ended else sizes.get(first, 1), None
