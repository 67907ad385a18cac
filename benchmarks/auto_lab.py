"""Does AutoStrategy pick well? In the lab, against every fixed choice it has; then the rate drops to a tenth.

    python -m benchmarks.auto_lab            4 workers, 20 Mbit/s and 1 Gbit/s (10 Gbit/s scaled by 0.1)

Per rate: seconds per step of each option, then of AutoStrategy after its measuring steps. At the higher rate
the paths are then shaped to a tenth in mid-training, and the pick before and after is reported.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch.distributed as dist
from torch.optim import SGD

import thinwire as tw
from benchmarks.common import (
    lab_worker,
    note,
    parser_of,
    print_head,
    print_row,
    result_file,
    run_in_lab,
)
from thinwire.bench.harness import Train, slowest, time_steps, training
from thinwire.engine.link import Link
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import parse_rate
from thinwire.lab.control import Control
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.planner.auto import OPTIONS
from thinwire.strategies import registry
from thinwire.strategies.base import Strategy

NET = "params=1e6,layers=12,forward=0.06,backward=0.12"
RATES = ("20mbit", "1gbit")
RECONSIDER = 12


def worker(steps: int) -> None:
    with lab_worker() as control:
        for rate in RATES:
            _set(control, parse_rate(rate))
            found: dict[str, Any] = {"rate": rate, "net": NET, "options": {}}
            for text in OPTIONS:
                link, train = _attached(registry.from_text(text))
                with link:
                    train(8)
                    found["options"][text] = _step_s(train, steps)
            found |= _auto(control, rate, steps)
            if dist.get_rank() == 0:
                control.report(found)
            dist.barrier()


def _auto(control: Control, rate: str, steps: int) -> dict[str, Any]:
    strategy = tw.AutoStrategy(accuracy_budget=0.5, measure_steps=8, reconsider_every=RECONSIDER)
    link, train = _attached(strategy)
    with link:
        train(9)
        found: dict[str, Any] = {"auto": _step_s(train, steps), "pick": _pick(link)}
        if rate == RATES[-1]:
            _set(control, parse_rate(rate) / 10)
            train(2 * RECONSIDER + 1)  # in the first part of these, most steps are still of the rate before
            found |= {"pick_after_drop": _pick(link), "after_drop": _step_s(train, steps)}
    return found


def _attached(strategy: Strategy) -> tuple[Link, Train]:
    model = EmulatedModel(parse_net(NET), seed=dist.get_rank())
    optimizer = SGD(model.parameters(), lr=0.01)
    return tw.attach(model, optimizer, strategy), training(model, optimizer)


def _set(control: Control, bit_per_s: float) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        control.set_rate(bit_per_s)
    dist.barrier()


def _pick(link: Link) -> str:
    return OPTIONS[int(link.stats.instruments["pick"])]


def _step_s(train: Train, steps: int) -> float:
    """The median step of the slowest worker."""
    return slowest(statistics.median(time_steps(train, 1)["step_s"] for _ in range(steps)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each; below the reconsideration")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        worker(arguments.steps)
        return
    file = result_file("auto_lab")
    lab = describe(hosts=4, rate="1gbit")
    inside = ("benchmarks.auto_lab", "--inside", "--steps", str(arguments.steps))
    outcome = run_in_lab(lab, *inside, time_limit_s=600)
    print_head("rate", *OPTIONS, "auto", "pick", "pick after a tenth")
    for found in outcome.reports:
        times = [f"{found['options'][text]:.3f}" for text in OPTIONS]
        print_row(
            found["rate"], *times, f"{found['auto']:.3f}", found["pick"], found.get("pick_after_drop", "-")
        )
    note(f"saved {file.save({'rows': outcome.reports, 'busy_share': outcome.busy_share})}")


if __name__ == "__main__":
    main()
