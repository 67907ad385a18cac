"""Faults in numbers: does an elastic world hang, lose or double a sample, or grow, after hundreds of changes?

    python -m benchmarks.churn rosters --faults 1500
    python -m benchmarks.churn simulated --faults 400
    python -m benchmarks.churn processes --faults 200 --strategy all-reduce
    python -m benchmarks.churn visits --faults 500
    python -m benchmarks.churn visits --faults 500 --wire tls

`rosters`: who is in, on a virtual network (crashes, freezes, partitions, joins; messages late and lost): one
membership a generation, and one world at the end. `simulated`: whole trainings on the virtual clock, killed
and joined at random times under every kind of strategy: samples. `processes`: one world of real processes, in
which workers are killed, frozen and joined again and again; one of them lives through all of it, and its open
files, threads and memory are read. `visits`: a thousand generations of one world, without the start of new
processes: one joins and leaves with an error, again and again; what Python holds in one that stays is counted
too. Each portion adds its line to one result.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import RESULTS, alone_in, note, parser_of, print_head, print_row
from thinwire.bench.config import provenance

PER_SCHEDULE = 8
"""Changes in one schedule of rosters."""
STRATEGIES = (
    *("all-reduce", "gossip-grad", "stochastic-gradient-push", "sasgd:interval=4", "topk:density=0.1"),
    *("downpour", "easgd:interval=2", "diloco:interval=3"),
)


def rosters(num_faults: int, seed: int) -> dict[str, Any]:
    """Random schedules on a virtual network."""
    from tests.elastic.test_roster import after_faults

    dice, wrong = random.Random(seed), list[str]()
    kinds = ("crash", "freeze", "partition", "heal", "join")
    counts = Counter[str]()
    schedules = 0
    while counts.total() - counts["heal"] < num_faults:  # the end of a partition is none
        faults = [
            (dice.choice(kinds), dice.uniform(0.0, 12.0), dice.randrange(1 << 16))
            for _ in range(PER_SCHEDULE)
        ]
        size, own_seed = dice.randint(2, 9), dice.randrange(1 << 32)
        try:
            network = after_faults(size, own_seed, faults)
            worlds = {network.membership(id_) for id_ in network.living()} - {None}
            whole = [w for w in worlds if w is not None and set(w.ids) <= set(network.living())]
            if len(whole) > 1:
                wrong.append(f"{size} {own_seed} {faults}: {len(whole)} worlds")
        except AssertionError as error:
            wrong.append(f"{size} {own_seed} {faults}: {error}")
        counts.update(kind for kind, *_ in faults)
        schedules += 1
    done = counts.total() - counts["heal"]
    found = {"faults": done, "kinds": dict(counts), "runs": schedules}
    return {"what": "rosters", **found, "seed": seed, "wrong": wrong}


def simulated(num_faults: int, seed: int) -> dict[str, Any]:
    """Trainings on the virtual clock, four faults each."""
    from thinwire.errors import ThinwireError
    from thinwire.hosts.description import describe
    from thinwire.recipes import registry
    from thinwire.recipes.config import resolve
    from thinwire.recipes.virtual import VirtualCluster, simulate

    dice, counts, wrong, runs = random.Random(seed), Counter[str](), list[str](), 0
    recipe = registry.get("digits-cnn")
    while counts.total() < num_faults:
        workers, strategy = dice.randint(4, 7), STRATEGIES[runs % len(STRATEGIES)]
        victims = dice.sample(range(workers), 2)
        faults = [f"kill:host={host},after={dice.uniform(0.1, 0.9):.3f}" for host in victims]
        faults += [f"rejoin:host={host},after={dice.uniform(1.5, 3.5):.3f}" for host in victims]
        description = describe(hosts=workers, rate="100mbit", faults=faults, slow=[f"{workers - 1}=0.6"])
        cluster = VirtualCluster(
            description=description, latency_s=0.001, compute_s=0.1, recovery_s=0.5, jitter=0.1
        )
        settings: dict[str, Any] = {
            "workers": workers,
            "epochs": 2,
            "batch_size": 32,
            "seed": runs,
            "device": "cpu",
        }
        place = f"{strategy}, {workers} workers, {faults}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = simulate(recipe, resolve(recipe.name, strategy, **settings), cluster, Path(folder))
            came = [words.partition("s: ")[2] for words in result.happened]
            counts.update(each.kind for each in description.faults if str(each) in came)
            for words in result.accounts:
                if " 0 more often" not in words or _never(words) >= workers:  # the last ones do not go around
                    wrong.append(f"{place}: {words}")
        except ThinwireError as error:
            wrong.append(f"{place}: {error}")
            counts["ended with an error"] += len(faults)
        runs += 1
    found = {"faults": counts.total(), "kinds": dict(counts), "runs": runs}
    return {"what": "simulated", **found, "seed": seed, "wrong": wrong}


def _never(words: str) -> int:
    """Samples never trained on, which may be the rest that does not go around."""
    return int(words.split(" never")[0].split()[-1])


def processes(num_faults: int, seed: int, strategy: str, minutes: float) -> dict[str, Any]:
    from benchmarks.churn_processes import Churn

    with tempfile.TemporaryDirectory() as folder:
        return Churn(Path(folder), strategy, seed).run(num_faults, minutes)


def visits(
    count: int, seed: int, strategy: str, wire: Literal["plain", "tls"], minutes: float
) -> dict[str, Any]:
    from benchmarks.churn_visits import visits as visit

    with tempfile.TemporaryDirectory() as folder:
        return visit(Path(folder), strategy, wire, seed, count, minutes)


def print_table(found: list[dict[str, Any]]) -> None:
    print_head("what", "faults", "runs", "wrong")
    for what in ("rosters", "simulated", "processes", "visits"):
        some = [each for each in found if each["what"] == what]
        counts = [sum(each[key] for each in some) for key in ("faults", "runs")]
        print_row(what, *counts, sum(len(each["wrong"]) for each in some))
    for each in found:
        for words in each["wrong"][:5]:
            print(f"- {each['what']}: {words}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["rosters", "simulated", "processes", "visits"])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="all-reduce")
    parser.add_argument(
        "--wire", choices=["plain", "tls"], default="plain", help="of visits; tls has no Gloo"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of processes and visits: cause no fault after so long"
    )
    parser.add_argument("--result", type=Path, default=RESULTS / "churn.json")
    options = parser.parse_args()
    begin, began_s = provenance(), time.monotonic()
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "rosters": lambda: rosters(options.faults, options.seed),
        "simulated": lambda: simulated(options.faults, options.seed),
        "processes": lambda: processes(options.faults, options.seed, options.strategy, options.minutes),
        "visits": lambda: visits(
            options.faults, options.seed, options.strategy, options.wire, options.minutes
        ),
    }
    line = {**calls[options.what](), "seconds": round(time.monotonic() - began_s, 1), "begin": begin}
    with alone_in(options.result.parent):
        found = json.loads(options.result.read_text())["portions"] if options.result.exists() else []
        found.append(line)
        lines = ",\n  ".join(json.dumps(each, default=str) for each in found)
        options.result.write_text('{"portions": [\n  ' + lines + "\n]}\n")
    note(json.dumps({key: value for key, value in line.items() if key != "begin"}, default=str))
    print_table(found)


if __name__ == "__main__":
    main()
