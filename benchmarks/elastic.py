"""Elastic worlds under faults in the lab: seconds from a fault to the first step of all who are left.

    python -m benchmarks.elastic --sizes 4 8 16 --trials 3 --minutes 7

Every trial is a lab of its own: P hosts at 1 Gbit/s with a worker each (20 ms steps), and one fault at a
moment drawn from a seed. Deaths: SIGKILL of one worker, of the first one, of half of them at one moment.
Silence (`silence_s=10`): SIGSTOP of one, the path of one host down, the path of the host of the store down, a
partition; it lasts 12 s, and whoever was left out joins again. Goes on where it stopped; `--minutes` ends a
portion. Counted with it: samples of all epochs, hangs, models at the end.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, note, parser_of, print_head, print_row
from thinwire.bench.config import provenance
from thinwire.chaos.lab import run_in_lab
from thinwire.chaos.report import judge
from thinwire.hosts.description import Description, Fault, describe

STRATEGIES = ("all-reduce", "gossip-grad", "easgd:interval=4")
"""Of the trials of a cell, in turn."""
DEATHS = ("kill", "kill the first", "kill half")
SILENCE = ("freeze", "link down", "link of the store's host down", "partition")
SPARES_FIRST = ("kill", "kill half", "freeze", "link down", "partition")
"""Kinds of faults that torchft can be asked to live through: its lighthouse must not be lost."""
LASTS_S = 12.0
MOST_S = {**dict.fromkeys(DEATHS, 3.0), **dict.fromkeys(SILENCE, 12.0)}
"""What we want to stay below."""
LIMIT_S = 100.0


def faults_of(kind: str, size: int, dice: random.Random) -> list[Fault]:
    """What happens in one trial, at a random moment."""
    at_s = round(dice.uniform(1.0, 3.0), 2)
    one = dice.randrange(1, size)
    if kind in DEATHS:
        victims = {"kill": [one], "kill the first": [0], "kill half": list(range(size // 2))}[kind]
        return [Fault(kind="kill", host=host, after_s=at_s) for host in victims]
    if kind == "freeze":
        return [Fault(kind="pause", host=one, after_s=at_s, seconds=LASTS_S)]
    if kind == "partition":
        return [Fault(kind="cut", site=1, after_s=at_s, seconds=LASTS_S)]
    host = one if kind == "link down" else 0
    return [Fault(kind="cut", host=host, after_s=at_s, seconds=LASTS_S)]


def description_of(size: int, kind: str, faults: list[Fault]) -> Description:
    sites = f"{size - size // 3}+{size // 3}" if kind == "partition" else None
    return describe(
        hosts=size,
        rate="1gbit",
        sites=sites,
        uplink="1gbit" if sites else None,
        faults=[str(fault) for fault in faults],
    )


def trial(size: int, kind: str, number: int, seed: int) -> dict[str, Any]:
    """One lab with one fault."""
    dice = random.Random(f"{seed} {size} {kind} {number}")
    strategy = STRATEGIES[number % len(STRATEGIES)]
    description = description_of(size, kind, faults_of(kind, size, dice))
    seconds = 6.0 if kind in DEATHS else 4.0 + LASTS_S + 9.0
    command = ["-m", "benchmarks.elastic_worker", strategy, str(seconds)]
    with tempfile.TemporaryDirectory() as folder:
        report = judge(run_in_lab(command, description, Path(folder), time_limit_s=LIMIT_S))
    told = report.faults
    resumed = [each.resumed_s for each in told]
    return {
        "size": size,
        "kind": kind,
        "number": number,
        "strategy": strategy,
        "faults": [each.fault for each in told],
        "noticed_s": max((each.noticed_s or math.nan for each in told), default=math.nan),
        "how": told[0].how if told else "",
        "resumed_s": max((math.nan if each is None else each for each in resumed), default=math.nan),
        "generations": report.generations,
        "steps": report.steps,
        "samples": [report.samples.samples, report.samples.doubled, report.samples.missing],
        "models": report.models,
        "wrong": list(report.wrong),
    }


def torchft_trial(size: int, kind: str, number: int, seed: int) -> dict[str, Any]:
    """The same with torchft, whose lighthouse is spared: of half of the workers the last ones are killed."""
    dice = random.Random(f"{seed} {size} {kind} {number}")
    faults = faults_of(kind, size, dice)
    if kind == "kill half":
        faults = [replace(fault, host=size - 1 - (fault.host or 0)) for fault in faults]
    description = description_of(size, kind, faults)
    command = ["-m", "benchmarks.elastic_torchft", "14"]
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_in_lab(command, description, Path(folder), time_limit_s=LIMIT_S)
        begins = {str(each.fault): each.at for each in reversed(outcome.struck)}  # its end is told too
        at = max(begins.values(), default=math.nan)
        cut_off = set(range(size - size // 3, size))
        lost = cut_off if kind == "partition" else {fault.host for fault in faults}
        left = [each for each in outcome.journals.workers if each.host not in lost]
        firsts = [
            next(
                (d.at for d in each.of("done") if d.at > at and d.facts["size"] == size - len(lost)), math.nan
            )
            for each in left
        ]
    return {
        "size": size,
        "kind": kind,
        "number": number,
        "strategy": "torchft",
        "faults": list(begins),
        "resumed_s": None if any(map(math.isnan, firsts)) else max(firsts) - at,
        "steps": max((line.facts["steps"] for each in left for line in each.of("done")), default=0),
        "wrong": [] if len(left) == size - len(lost) else [f"{len(left)} workers were there"],
    }


def cells(sizes: list[int], trials: int) -> Iterator[tuple[int, str, int]]:
    for number in range(trials):
        for size in sizes:
            for kind in (*DEATHS, *SILENCE):
                yield size, kind, number


def _is_rival(trial: dict[str, Any]) -> bool:
    return bool(trial["strategy"] == "torchft")


def print_table(found: list[dict[str, Any]], sizes: list[int]) -> None:
    print_head("fault", *(f"P = {size}" for size in sizes), "wanted")
    for rival, kind in product((False, True), (*DEATHS, *SILENCE)):
        row = []
        for size in sizes:
            some = [e for e in found if (e["size"], e["kind"], _is_rival(e)) == (size, kind, rival)]
            row.append(" / ".join("-" if e["resumed_s"] is None else f"{e['resumed_s']:.2f}" for e in some))
        if any(row):
            print_row(kind + (", torchft" if rival else ""), *row, f"{MOST_S[kind]:g}")
    wrong = [each for each in found if each["wrong"]]
    print(f"{len(found)} trials, {len(wrong)} with something wrong")
    for each in wrong:
        print(f"- {each['kind']} at P = {each['size']}, {each['strategy']}: {'; '.join(each['wrong'])}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--kinds", nargs="+", default=[*DEATHS, *SILENCE])
    parser.add_argument("--torchft", action="store_true", help="the same with torchft 0.2.0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=7.0, help="start no trial after so long")
    parser.add_argument("--result", type=Path, default=RESULTS / "elastic_lab.json")
    options = parser.parse_args()
    paths = [
        str(ROOT),
        str(ROOT / "src"),
        os.environ.get("PYTHONPATH", ""),
    ]  # torchft may be in a folder there
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    saved = (
        json.loads(options.result.read_text()) if options.result.exists() else {"portions": [], "trials": []}
    )
    found = saved["trials"]
    known = {
        (each["size"], each["kind"], each["number"]) for each in found if _is_rival(each) == options.torchft
    }
    began_s, portion = time.monotonic(), {"begin": provenance()}
    for size, kind, number in cells(options.sizes, options.trials):
        left_out = kind not in options.kinds or (options.torchft and kind not in SPARES_FIRST)
        if (size, kind, number) in known or left_out:
            continue
        if time.monotonic() - began_s > 60 * options.minutes:
            note("the time of this portion is up: run it again for the rest")
            break
        found.append((torchft_trial if options.torchft else trial)(size, kind, number, options.seed))
        note(json.dumps(found[-1]))
        lines = ",\n  ".join(json.dumps(each) for each in found)
        head = json.dumps(
            {"seed": options.seed, "portions": [*saved["portions"], portion]}, indent=1, default=str
        )
        options.result.write_text(head[:-2] + ',\n "trials": [\n  ' + lines + "\n ]\n}\n")
    print_table(found, options.sizes)


if __name__ == "__main__":
    main()
