"""Is `thinwire plan --script` right? Scripts that compute on the processor, predicted, then run in the lab.

    python -m benchmarks.plan_scripts

Per rate: `thinwire doctor` in the lab, then each script for some steps on its own, as many at once as
there are hosts on this machine (`measure_script`), then each unchanged script with each strategy on all hosts
of the lab, where only the times of its optimizer's steps are looked at. Nothing is fitted to them.
"""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.common import note, parser_of, print_head, print_row, result_file, run_in_lab
from thinwire.hosts.description import Description, describe
from thinwire.lab.control import Control
from thinwire.lab.run import Job, run
from thinwire.planner.cluster import Cluster
from thinwire.planner.plan import links_of
from thinwire.planner.predict import Planner
from thinwire.planner.script import measure_script

SCRIPTS = (
    "examples/char_gpt.py --steps 100",
    "examples/imagenet.py --epochs 16 --batch 128",  # epochs of five steps: the middle of few says little
    "benchmarks/resnet20.py --steps 80",
)
STRATEGIES = ("all-reduce", "gossip-grad:share=0.1")
WARM_UP = 10


def worker(script: str, arguments: list[str]) -> None:
    """Run the script as its user would, and report the seconds from one optimizer step to the next."""
    ended_s = list[float]()

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ended_s.append(time.perf_counter())

    handle = register_optimizer_step_post_hook(stepped)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    handle.remove()
    control = Control.from_environment()
    assert control is not None, "to be run in a lab"
    control.report(median(after - before for before, after in pairwise(ended_s[WARM_UP:])))


def examine(lab: Description) -> Cluster:
    """The doctor's cluster file of this lab."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        outcome = run(Job(description=lab, command=("-m", "thinwire", "doctor", "--out", str(file))))
        if outcome.exit_code != 0:
            sys.exit(f"the doctor failed with exit code {outcome.exit_code}")
        return Cluster.load(file)


def measure(rate: str, hosts: int, scripts: list[str], strategies: list[str]) -> list[dict[str, Any]]:
    lab, rows = describe(hosts=hosts, rate=rate), list[dict[str, Any]]()
    cluster = examine(lab)
    for script in scripts:
        workload = measure_script(shlex.split(script), at_once=cluster.workers_per_machine)
        planner = Planner(workload, cluster, links_of(workload, strategies))
        for strategy in strategies:
            command = ("benchmarks.plan_scripts", "--inside", *shlex.split(script), "--strategy", strategy)
            outcome = run_in_lab(lab, *command, time_limit_s=300)
            measured_s, predicted_s = max(outcome.reports), planner.predict(strategy, hosts).step_s
            sizes = {"num_params": workload.num_params, "compute_s": workload.compute_s}
            found = {"measured_s": measured_s, "predicted_s": predicted_s}
            rows.append(
                {"rate": rate, "hosts": hosts, "script": script, "strategy": strategy, **sizes, **found}
            )
            rows[-1] |= {"busy_share": outcome.busy_share, "cluster": asdict(cluster)}
            note(f"  {rate}, {script}, {strategy}: {measured_s:.4f} s, predicted {predicted_s:.4f} s")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", default="100mbit")
    parser.add_argument("--hosts", type=int, default=2, help="on two cores: each worker has one")
    parser.add_argument("--scripts", default=";".join(SCRIPTS), help="with their arguments, apart by ;")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--trial", action="store_true", help="keep the result out of benchmarks/results")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        worker(arguments.inside[0], arguments.inside[1:])
        return
    file, rows = result_file("plan_scripts", trial=arguments.trial), list[dict[str, Any]]()
    path = Path()
    lists = arguments.scripts.split(";"), arguments.strategies.split(",")
    for rate in arguments.rates.split(","):
        rows += measure(rate, arguments.hosts, *lists)
        path = file.save({}, rows=rows)
    print_head("rate", "script", "strategy", "computing", "predicted", "measured", "error")
    for row in rows:
        times = [f"{1e3 * row[name]:.1f} ms" for name in ("compute_s", "predicted_s", "measured_s")]
        error = f"{100 * (row['predicted_s'] / row['measured_s'] - 1):+.1f} %"
        print_row(row["rate"], row["script"], row["strategy"], *times, error)
    note(f"saved {path}")


if __name__ == "__main__":
    main()
