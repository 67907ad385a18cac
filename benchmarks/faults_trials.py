"""The trials of `benchmarks.faults`: what goes wrong when, drawn from a seed, and what is right then."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KINDS = {
    "kill": 45,
    "kill the store's worker": 25,
    "stop": 25,
    "stop and continue": 25,
    "exception": 40,
    "fewer steps": 25,
    "sys.exit": 20,
    "os._exit": 20,
    "link down": 25,
    "store's link down": 15,
    "link down and up": 20,
    "partition": 15,
}
"""Trials of each kind among 300."""
HARMLESS = ("stop and continue", "link down and up")
"""Kinds that are over before anybody is taken for lost."""
DEADLY = ("kill", "kill the store's worker", "stop", "os._exit")
"""Kinds whose victim says nothing any more."""
CUTS = ("link down", "store's link down", "link down and up", "partition")
STRATEGIES = (
    "silent",
    "all-reduce",
    "all-reduce:overlap=none",
    "all-reduce:overlap=forward",
    "gossip-grad",
    "gossip-grad:share=0.5:payload=int8",
    "gossip-grad:average_every=3",
    "stochastic-gradient-push",
    "topk:density=0.01",
    "gtopk:density=0.01",
    "oktopk:density=0.01",
    "sasgd:interval=3",
    "sasgd:interval=auto",
    "diloco:interval=3:fragments=2:delay=2:payload=int4",
    "diloco:interval=2:gossip=true",
    "trickle:interval=2",
    "partial-averaging:interval=2",
    "post-local:exact_steps=5:interval=2",
    "hierarchical-averaging:interval=4:inner_interval=2",
    "hierarchical-averaging:interval=2:inside=gradients",
    "downpour",
    "easgd:interval=2",
)
WAITLESS = ("silent", "stochastic-gradient-push", "downpour", "easgd:interval=2")
"""Strategies with steps that wait for nobody: there, whoever has fewer of them waits in detach."""
PHASES = ("before attach", "forward", "backward", "optimizer step", "saving", "before detach", "in detach")
STYLES = ("with", "finally", "bare")
"""How a script leaves its link: `with`, `finally: link.detach()`, or not at all."""
HOSTS_PER_SITE = 3
NUM_HOSTS = 2 * HOSTS_PER_SITE
NUM_STEPS = 1_000_000
"""Of a training that the fault must end."""
HANG_S = 60.0
"""Whoever takes longer than this to end hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training with one fault."""

    number: int
    kind: str
    strategy: str
    hosts: tuple[int, ...]
    """Hosts of the lab, in order of rank."""
    victim: int
    """A rank; for a partition, the one whose site is cut off."""
    phase: str
    step: int
    """Steps before the fault."""
    seconds: float
    """How long a harmless fault lasts."""
    style: str
    store: str
    """Where the store lives: in "worker" 0, or in a process beside it, as torchrun's "agent" has it."""

    @property
    def num_steps(self) -> int:
        if self.phase in ("before detach", "in detach"):
            return self.step
        return self.step + 15 if self.kind in HARMLESS else NUM_STEPS

    @property
    def ranks(self) -> range:
        return range(len(self.hosts))

    def culprits(self, rank: int) -> set[int]:
        """Ranks that a worker may name."""
        if self.kind == "partition":
            side = self.hosts[rank] // HOSTS_PER_SITE
            return {other for other in self.ranks if self.hosts[other] // HOSTS_PER_SITE != side}
        if self.kind in CUTS and rank == self.victim:
            return set(self.ranks) - {rank}
        return {self.victim}

    def survivors(self) -> list[int]:
        """Ranks that must raise an error, or for a harmless fault come to their end."""
        if self.kind in CUTS or self.kind in HARMLESS:
            return list(self.ranks)
        return [rank for rank in self.ranks if rank != self.victim]

    def exit_code(self, rank: int, found: Collection[str]) -> int:
        """With which a script of this style is to end, after these events."""
        if rank == self.victim and self.kind == "sys.exit":
            return 3
        if "done" in found or "error" not in found:
            return 0
        return 7 if self.style == "finally" and not (rank == self.victim and self.kind == "exception") else 1


def draw(count: int, seed: int) -> list[Trial]:
    """Trials that are the same for the same seed; fewer are the first of them."""
    dice = random.Random(seed)
    kinds = [kind for kind, times in KINDS.items() for _ in range(times)]
    dice.shuffle(kinds)
    return [_draw(number, kinds[number % len(kinds)], dice) for number in range(count)]


def _draw(number: int, kind: str, dice: random.Random) -> Trial:
    hosts = dice.sample(range(NUM_HOSTS), dice.randint(2, NUM_HOSTS))
    if kind == "partition":
        here, there = range(HOSTS_PER_SITE), range(HOSTS_PER_SITE, NUM_HOSTS)
        hosts = dice.sample(here, dice.randint(1, 3)) + dice.sample(there, dice.randint(1, 3))
        dice.shuffle(hosts)
    victim = 0 if "store's" in kind else dice.randrange(len(hosts))
    # A worker that stands still or is cut off before it attaches may be loading its data: nobody can tell.
    phases = [each for each in PHASES if each != "before attach" or kind not in ("stop", *HARMLESS, *CUTS)]
    if kind == "fewer steps":
        phases = ["forward"]
    if kind in ("exception", "sys.exit", *HARMLESS):
        phases.remove("in detach")
    if kind == "sys.exit":
        phases.remove("before detach")  # that is how a script may end
    phase, step = dice.choice(phases), dice.randint(2, 12)
    strategy = STRATEGIES[(number + number // len(STRATEGIES)) % len(STRATEGIES)]
    if kind == "fewer steps" and strategy in WAITLESS:
        strategy = "gossip-grad"
    styles: Sequence[str] = STYLES
    if phase == "saving":
        styles = ("with",)
    if kind == "exception" and phase == "before detach":
        styles = ("with", "bare")  # with `finally: link.detach()` everybody is through, and leaves well
    if kind == "sys.exit" and strategy in WAITLESS:
        styles = ("with",)
    store = "worker" if kind == "kill the store's worker" else dice.choice(("worker", "worker", "agent"))
    return Trial(
        number=number,
        kind=kind,
        strategy=strategy,
        hosts=tuple(hosts),
        victim=victim,
        phase=phase,
        step=step,
        seconds=round(dice.uniform(1, 6 if kind == "stop and continue" else 3), 1),
        style=dice.choice(styles),
        store=store,
    )


def judge(trial: Trial, workers: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """One line about a trial, from the events of each worker: who raised what when, and what was wrong."""
    times = [event["at_s"] for events in workers.values() for event in events if event["what"] == "fault"]
    line: dict[str, Any] = {**asdict(trial), "errors": {}, "raised_s": {}, "ended_s": {}, "codes": {}}
    if not times:
        return {**line, "wrong": ["the fault was not reached"]}
    wrong = []
    for rank in trial.ranks:
        found = {event["what"]: event for event in reversed(workers[rank])}
        end, error = found["end"], found.get("error")
        line["codes"][rank] = end["code"]
        if error is not None:
            line["errors"][rank] = [error["type"], error["rank"], error["text"]]
        if rank not in trial.survivors():
            if trial.kind in ("exception", "sys.exit") and end["code"] != trial.exit_code(rank, found):
                wrong.append(f"victim ends with code {end['code']}")
            continue
        line["ended_s"][rank] = round(end["at_s"] - times[0], 2)
        if error is not None:
            line["raised_s"][rank] = round(error["at_s"] - times[0], 2)
        if end["killed"] or line["ended_s"][rank] > HANG_S:
            wrong.append(f"{rank} hangs")
        elif end["code"] != trial.exit_code(rank, found):
            wrong.append(f"{rank} ends with code {end['code']}")
        if error is None and "done" not in found and not end["killed"]:
            wrong.append(f"{rank} says nothing")
        if error is None and trial.kind not in HARMLESS:
            wrong.append(f"{rank} raises nothing")
        if error is not None and trial.kind in HARMLESS:
            wrong.append(f"{rank} raises")
        if error is not None and error["rank"] not in trial.culprits(rank):
            wrong.append(f"{rank} names {error['rank']}")
    return {**line, "wrong": wrong}
