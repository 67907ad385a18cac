"""What an elastic link costs when nothing fails: steps with and without it, in turn, on two real workers.

    python -m benchmarks.elastic_cost --steps 200 --blocks 8

Blocks of steps of one model, with an ordinary link and with an elastic one (its loop, sampler, and control
sockets included), alternate in the same processes. Compared are wall time, the processor time of each
process, and the time between two steps, from the end of one's work to the begin of the next one's: all that
the loop, the sampler and the look at the others take of the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.common import parser_of, print_head, print_row, result_file, run_workers

BATCH_SIZE = 64
WIDTH = 512


def blocks(steps: int, count: int) -> list[dict[str, Any]]:
    """One worker's blocks, ordinary and elastic in turn."""
    torch.set_num_threads(1)
    found = []
    for number in range(2 * count + 2):
        elastic = number % 2 == 1
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        data = torch.randn(BATCH_SIZE, WIDTH)
        with tw.attach(model, optimizer, tw.AllReduce(), elastic=elastic) as link:
            marks, ends = list[float](), list[float]()
            assert link.world_size == 2
            cpu_s = 0.0
            for step in _elastic_steps(link, steps) if elastic else range(steps):
                if step == 20:
                    cpu_s = time.process_time()
                marks.append(time.perf_counter())
                model(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
                if step == steps - 1:
                    cpu_s = time.process_time() - cpu_s
        if number >= 2:  # the first of each warms up
            wall_s = median(after - before for before, after in pairwise(marks[20:]))
            between_s = median(after - before for before, after in zip(ends[20:-1], marks[21:], strict=True))
            found.append(
                {
                    "elastic": elastic,
                    "wall_s": wall_s,
                    "cpu_s": cpu_s / (steps - 20),
                    "between_s": between_s,
                }
            )
    return found


def _elastic_steps(link: tw.Link, steps: int) -> Iterator[int]:
    """The loop that elastic training has."""
    sampler = link.sampler(steps * BATCH_SIZE * link.world_size, batch_size=BATCH_SIZE)
    for _ in link.epochs(1):
        for number, step in enumerate(link.each_step(sampler)):
            with step:
                yield number


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    file = result_file("elastic_cost", trial=options.blocks < 4)
    found = [each for mine in run_workers(2, blocks, options.steps, options.blocks) for each in mine]
    print_head("", "ordinary", "elastic", "more")
    step_s = median(each["wall_s"] for each in found if not each["elastic"])
    for key in ("wall_s", "cpu_s", "between_s"):
        plain, elastic = (
            median(each[key] for each in found if each["elastic"] is kind) for kind in (False, True)
        )
        more = (elastic - plain) / (step_s if key == "between_s" else plain)
        print_row(key, f"{1e3 * plain:.3f} ms", f"{1e3 * elastic:.3f} ms", f"{more:+.2%}")
    print(file.save({"options": vars(options)}, blocks=found))


if __name__ == "__main__":
    main()
