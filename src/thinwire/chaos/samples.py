"""The account of samples: in each epoch every one is trained on once by those who are left and come.

A step counts if what it changed is in the models that went on. Where replicas agree, that is every step
before the one that the next generation began with, done or redone. Where they differ, it is what a worker has
done itself; of a lost worker, what all agreed it had done: the rest is dealt again, and is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.chaos.journals import Line, WorkerJournal

World = tuple[str, int]
"""Lineage and generation."""


@dataclass(slots=True)
class SampleAccount:
    """What became of the samples of all epochs that were finished."""

    epochs: int = 0
    samples: int = 0
    doubled: int = 0
    missing: int = 0
    again: int = 0
    """Trained on again, because the worker that had done so was lost with its model."""
    examples: list[str] = field(default_factory=list)
    """The first wrong ones, in words."""

    @property
    def right(self) -> bool:
        return not self.doubled and not self.missing


@dataclass(slots=True)
class _Step:
    generation: int
    epoch: int
    steps: int
    indices: list[int]
    done: bool = False
    number: int = 0
    """Among those that this worker did in this generation and epoch."""


def account(workers: Sequence[WorkerJournal], lineage: str = "") -> SampleAccount:
    """The account of one lineage: by default that of the first generation. What a fork did before it was one
    belongs to the other."""
    trains = [(each, line) for each in workers for line in each.of("trains")]
    found = SampleAccount()
    if not trains:
        return found
    lineage = lineage or min(trains, key=lambda pair: pair[1].facts["generation"])[1].facts["lineage"]
    worlds = _worlds([line for _, line in trains if line.facts["lineage"] == lineage])
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for worker in workers:
        for step in _counted(worker, lineage, worlds, found):
            counts[step.epoch].update(step.indices)
    ends = [line.facts for each in workers for line in _inside(each, lineage) if line.what == "epoch"]
    carried = {facts["epoch"]: facts["carried"] for facts in ends}
    num_samples = max((facts["num_samples"] for facts in ends), default=0)
    _judge(carried, counts, num_samples, found)
    return found


def _worlds(lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
    """By generation, what those who trained in it said: all say the same."""
    worlds: dict[int, dict[str, Any]] = {}
    for line in lines:
        facts = worlds.setdefault(line.facts["generation"], {**line.facts, "ranks": {}})
        facts["ranks"][line.facts["id"]] = line.facts["rank"]
    return worlds


def _inside(worker: WorkerJournal, lineage: str) -> Iterator[Line]:
    """What a worker noted while it trained in a world of this lineage."""
    inside = False
    for line in worker.lines:
        if line.what == "trains":
            inside = line.facts["lineage"] == lineage
        if inside:
            yield line


def _counted(
    worker: WorkerJournal, lineage: str, worlds: dict[int, dict[str, Any]], found: SampleAccount
) -> list[_Step]:
    steps = _steps(_inside(worker, lineage))
    kept = []
    for step in steps:
        after = next((worlds[g] for g in sorted(worlds) if g > step.generation), None)
        world = worlds[step.generation]
        if world["agrees"]:
            counts = step.done if after is None else step.steps < after["steps"]
        else:
            counts = step.done and (after is None or _stays(worker, step, world, after))
            found.again += len(step.indices) if step.done and not counts else 0
        if counts:
            kept.append(step)
    return kept


def _stays(worker: WorkerJournal, step: _Step, world: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether what a worker has done goes on with it, or was counted when it was lost."""
    (id_,) = worker.ids & world["ranks"].keys()
    if id_ in after["ranks"] or step.epoch != after["epoch"]:
        return True
    return step.number < int(after["done"][world["ranks"][id_]])


def _steps(lines: Iterator[Line]) -> list[_Step]:
    steps: list[_Step] = []
    numbers: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if line.what == "step":
            facts = line.facts
            steps.append(_Step(facts["generation"], facts["epoch"], facts["steps"], facts["indices"]))
        elif line.what == "done" and steps and not steps[-1].done:
            last = steps[-1]
            last.done, last.number = True, numbers[last.generation, last.epoch]
            numbers[last.generation, last.epoch] += 1
    return steps


def _judge(
    carried: dict[int, list[int]],
    counts: dict[int, Counter[int]],
    num_samples: int,
    found: SampleAccount,
) -> None:
    """Compare with what was due in each epoch that was finished."""
    for epoch in sorted(carried):
        due = Counter(range(num_samples))
        due.update(carried.get(epoch - 1, []))
        due.subtract(carried[epoch])
        more, fewer = counts[epoch] - due, due - counts[epoch]
        found.epochs += 1
        found.samples += sum(counts[epoch].values())
        found.doubled += sum(more.values())
        found.missing += sum(fewer.values())
        for word, wrong in (("too often", more), ("never", fewer)):
            if wrong and len(found.examples) < 5:
                found.examples.append(f"epoch {epoch}: {sum(wrong.values())} {word}, {sorted(wrong)[:5]} ...")
