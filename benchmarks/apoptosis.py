"""How small does apoptosis make a network, how much sooner is it trained, and what does that cost?

    python -m benchmarks.apoptosis --data DIR                 higgs-mlp, mnist-mlp and mnist-cnn, three seeds
    python -m benchmarks.apoptosis --data DIR --problems cifar-vgg16 --device cuda --seeds 1 --jobs 4 --bf16 \
        --methods none,adaptive,aggressive,lasso --minutes 4 --out DIR
    python -m benchmarks.apoptosis --data DIR --problems mnist-mlp --epochs 2 --trial

Every method trains the same network on the same batches: without apoptosis; with it, adaptive and aggressive;
with a group lasso that removes the neurons it has emptied (as PruneTrain); and with torch-pruning, which
removes the neurons of smallest weights at the same events, down to the size that the adaptive run ended with,
and gets a new optimizer each time, since it makes new parameters. How soon a metric is reached is seen on
samples held out of the training data, and so were settings chosen; the test data is looked at once, after the
last step. Times are to the best metric that the run without apoptosis ever had, as early stopping would keep
it, and to its last one, less 0.003. It trains with plain PyTorch, without a link. Evaluation is not timed.
On a CPU, seconds are those of the processor, in one thread: other work on the machine counts little. With
--keep DIR every training that has ended is kept there, and not made again. With --minutes a training ends
with the last epoch that fits, and is compared with the others after as many epochs. A training that fails is
written as far as it came.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.apoptosis_training import Run, Work, train
from benchmarks.common import ResultFile, note, parser_of, print_head, print_row, result_file
from benchmarks.recipes import prepared

METHODS = ("none", "adaptive", "aggressive", "lasso", "torch-pruning")
WITHIN = 0.003
"""Of a metric: how far below counts as the same."""


def seconds_to(run: Run, target: float) -> float | None:
    return next((p["seconds"] for p in run.curve if p["metric"] >= target), None)


def speedup(runs: list[Run], base: dict[int, Run], target: float) -> dict[str, Any]:
    """How many times sooner than the run without apoptosis, of the same seed, a metric is reached."""
    times = [(seconds_to(run, target), seconds_to(base[run.seed], target)) for run in runs]
    faster = [plain / ours for ours, plain in times if ours and plain]
    return {
        "target": target,
        "by_seed": faster,
        "mean": float(np.mean(faster)) if len(faster) == len(runs) else None,
        "reached": f"{len(faster)} of {len(runs)}",
    }


def ends(run: Run, other: Run) -> tuple[dict[str, float], dict[str, float]]:
    """The last points that two trainings have both come to."""
    last = min(len(run.curve), len(other.curve)) - 1
    return run.curve[last], other.curve[last]


def table(runs: list[Run]) -> list[dict[str, Any]]:
    """A row for each problem and method, without trainings that have failed."""
    rows = []
    runs = [run for run in runs if run.curve and not run.failed]
    for name in dict.fromkeys(run.problem for run in runs):
        own = [run for run in runs if run.problem == name]
        base = {run.seed: run for run in own if run.method == "none"}
        if not base:
            continue  # nothing to hold the others against yet
        # where a network learns by heart, it had its last metric long before
        best, last = (
            float(np.mean([pick([p["metric"] for p in run.curve]) for run in base.values()])) - WITHIN
            for pick in (max, lambda metrics: metrics[-1])
        )
        for method in dict.fromkeys(run.method for run in own):
            mine = [run for run in own if run.method == method and run.seed in base]
            if not mine:
                continue
            pairs = [ends(r, base[r.seed]) for r in mine]
            rows.append(
                {
                    "problem": name,
                    "method": method,
                    "final": float(np.mean([run.final for run in mine])),
                    "validation": float(np.mean([run.curve[-1]["metric"] for run in mine])),
                    "final_by_seed": [run.final for run in mine],
                    "interval": [run.interval for run in mine],
                    "fewer_parameters": float(np.mean([r.parameters[0] / r.parameters[1] for r in mine])),
                    "less_sent": 1
                    - float(np.mean([own["sent_bytes"] / plain["sent_bytes"] for own, plain in pairs])),
                    "whole_run_faster": float(
                        np.mean([plain["seconds"] / own["seconds"] for own, plain in pairs])
                    ),
                    "step_faster": [r.step_s and r.step_s[0] / r.step_s[1] for r in mine],
                    "unfinished": [r.unfinished for r in mine],
                    "to_best": speedup(mine, base, best),
                    "to_last": speedup(mine, base, last),
                    "event_share": float(np.mean([r.event_s / r.curve[-1]["seconds"] for r in mine])),
                    "event_share_of_plain_run": float(
                        np.mean([r.event_s / base[r.seed].curve[-1]["seconds"] for r in mine])
                    ),
                }
            )
    return rows


def make(work: Work, data: Path, device: str, threads: int, keep: Path | None) -> Run:
    """One training, in a process of its own; or what is kept of it."""
    kept = keep / f"{work.problem}-{work.method}-{work.seed}.json" if keep else None
    if kept is not None and kept.exists():
        return Run(**json.loads(kept.read_text()))
    torch.set_num_threads(threads)
    run = train(work, data, torch.device(device))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(vars(run)))
    return run


def make_all(works: list[Work], jobs: int, *rest: Any) -> Iterator[list[Run]]:
    """All trainings that have ended, each time one has; torch-pruning comes last, since it is told a size."""
    runs: list[Run] = []
    wanted = {(work.problem, work.method, work.seed): work for work in works}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for last in (False, True):
            goals = {(r.problem, r.seed): r.parameters[1] for r in runs if r.method == "adaptive"}
            now = [
                replace(work, goal=goals[work.problem, work.seed]) if last else work
                for work in works
                if (work.method == "torch-pruning") is last
                and (not last or (work.problem, work.seed) in goals)
            ]
            for each in as_completed([pool.submit(make, work, *rest) for work in now]):
                if each.exception() is None:
                    runs.append(each.result())
                    yield sorted(runs, key=lambda run: works.index(wanted[run.problem, run.method, run.seed]))
                else:
                    note("".join(traceback.format_exception(each.exception())))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST, higgs.npz, cifar10.npz")
    parser.add_argument("--problems", default="higgs-mlp,mnist-mlp,mnist-cnn")
    parser.add_argument("--methods", default=",".join(METHODS), help="none must be among them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than the problem has")
    parser.add_argument("--samples", type=int, help="only so many, of each part of the data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, images channels last")
    parser.add_argument("--minutes", type=float, help="end all trainings with their last epoch before")
    parser.add_argument("--keep", type=Path, help="folder for trainings that have ended")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--trial", action="store_true", help="only shows that it works")
    options = parser.parse_args()
    result = result_file("apoptosis", trial=options.trial)
    if options.out is not None:
        result = ResultFile(options.out, "apoptosis")
    works = [
        Work(
            problem=problem,
            method=method,
            seed=seed,
            epochs=options.epochs,
            samples=options.samples,
            bf16=options.bf16,
            ends_at=time.time() + 60 * options.minutes if options.minutes else None,
        )
        for problem in options.problems.split(",")
        for method in options.methods.split(",")
        for seed in range(options.seeds)
    ]
    hidden = {"data": "DIR", "keep": "DIR", "out": "DIR"}
    config = {key: hidden.get(key, value) for key, value in vars(options).items()}
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = prepared(options.data, Path(scratch)) if "cifar" in options.problems else options.data
        rest = (data, options.device, options.threads, options.keep)
        for runs in make_all(works, options.jobs, *rest):
            result.save({"config": config, "table": table(runs)}, runs=[vars(r) for r in runs])
    show(runs)
    note(f"written to {result.path}")


def show(runs: list[Run]) -> None:
    print_head(
        "problem",
        "method",
        "final",
        "parameters",
        "sent",
        "whole run",
        "to the best",
        "to the last",
        "events",
        "step",
    )
    for row in table(runs):
        sooner = [
            f"{each['mean']:.2f}x" if each["mean"] else f"reached by {each['reached']}"
            for each in (row["to_best"], row["to_last"])
        ]
        print_row(
            row["problem"],
            row["method"],
            f"{row['final']:.4f}",
            f"{row['fewer_parameters']:.1f}x fewer",
            f"{row['less_sent']:.0%} less",
            f"{row['whole_run_faster']:.2f}x",
            *sooner,
            f"{row['event_share']:.1%}",
            " ".join(f"{faster:.2f}x" for faster in row["step_faster"] if faster) or "-",
        )
        for why in filter(None, row["unfinished"]):
            note(f"{row['problem']} {row['method']} is unfinished: {why}")


if __name__ == "__main__":
    main()
