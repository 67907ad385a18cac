"""What an elastic link costs when nothing fails: steps with and without it, in turn, on two real workers.

    python -m benchmarks.elastic_cost --repeats 5

Every worker trains two equal models, one with an ordinary link and one with an elastic link (its loop,
sampler and control sockets included): a few steps of the one, then as many of the other, by turns the first.
Both are attached all the while, so that whatever else the machine does falls on both alike; a repeat attaches
anew. Compared are the wall time of a step, the processor time of the training thread and of the whole process
in it, and the time that the loop takes of the training thread, from the end of one step's work to the begin
of the next one's. What heartbeats and control sockets cost beside training is counted in a process that
sleeps, with the ordinary link alone and with both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.common import note, parser_of, print_head, print_row, result_file, run_workers, spread_of

BATCH_SIZE = 64
WIDTH = 512
MOST_STEPS = 1_000_000
IDLE_S = 4.0
KEYS = ("wall_s", "thread_s", "process_s", "between_s")


@dataclass(slots=True)
class _Training:
    """One of the two trainings of a worker."""

    link: tw.Link
    step: Callable[[], None]
    """Forward, backward and the optimizer."""
    steps: Iterator[int]
    """The loop, which yields once a step."""
    between: list[float] = field(default_factory=list)

    def block(self, num_steps: int) -> dict[str, float]:
        """Train so many steps; seconds of one."""
        self.between.clear()
        before = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(num_steps):
            left_s = time.perf_counter()
            next(self.steps)
            self.between.append(time.perf_counter() - left_s)
            self.step()
        after = time.perf_counter(), time.thread_time(), time.process_time()
        means = [(end - begin) / num_steps for begin, end in zip(before, after, strict=True)]
        return dict(zip(KEYS, [*means, median(self.between)], strict=True))


def _training(stack: ExitStack, *, elastic: bool) -> _Training:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = torch.randn(BATCH_SIZE, WIDTH)
    link = stack.enter_context(tw.attach(model, optimizer, tw.AllReduce(), elastic=elastic))
    assert link.world_size > 1

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _Training(link, step, _elastic_steps(link) if elastic else count())


def _elastic_steps(link: tw.Link) -> Iterator[int]:
    """The loop that elastic training has."""
    sampler = link.sampler(MOST_STEPS * BATCH_SIZE, batch_size=BATCH_SIZE, shuffle=False)
    for _ in link.epochs(1):
        for number, step in enumerate(link.each_step(sampler)):
            with step:
                yield number


def _idle() -> float:
    """Processor seconds of a process that sleeps, by second."""
    before_s = time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - before_s) / IDLE_S


def compare(num_repeats: int, num_pairs: int, num_steps: int) -> list[dict[str, Any]]:
    """One worker's pairs of blocks."""
    torch.set_num_threads(1)
    found = list[dict[str, Any]]()
    for repeat in range(num_repeats):
        with ExitStack() as stack:
            ordinary = _training(stack, elastic=False)
            ordinary.block(num_steps)
            idle_s = [_idle()]
            both = (ordinary, _training(stack, elastic=True))
            for each in both:
                each.block(num_steps)
            idle_s.append(_idle())
            for pair in range(num_pairs):
                order = (0, 1) if pair % 2 == 0 else (1, 0)
                blocks = {kind: both[kind].block(num_steps) for kind in order}
                found.append(
                    {"repeat": repeat, "idle_s": idle_s, "ordinary": blocks[0], "elastic": blocks[1]}
                )
            both[1].steps.close()  # type: ignore[attr-defined]  # a generator
        note(f"repeat {repeat + 1} of {num_repeats}")
    return found


def print_table(found: list[dict[str, Any]]) -> None:
    """Medians over all pairs, with quartiles, and over each repeat."""
    print_head(
        "", "ordinary, ms", "elastic, ms", "more, ms", "more, % of a step", "medians of the repeats, %"
    )
    step_s = median(each["ordinary"]["wall_s"] for each in found)
    repeats = sorted({each["repeat"] for each in found})
    for key in KEYS:
        more = [(each["repeat"], each["elastic"][key] - each["ordinary"][key]) for each in found]
        medians = [100 * median(value for at, value in more if at == repeat) / step_s for repeat in repeats]
        print_row(
            key,
            *(
                spread_of([each[kind][key] for each in found], scale=1e3, digits=3)
                for kind in ("ordinary", "elastic")
            ),
            spread_of([value for _, value in more], scale=1e3, digits=3),
            f"{100 * median(value for _, value in more) / step_s:+.2f}",
            ", ".join(f"{each:+.2f}" for each in medians),
        )
    plain, both = (
        spread_of([each["idle_s"][kind] for each in found], scale=1e3, digits=2) for kind in (0, 1)
    )
    print(f"asleep, processor ms a second: {plain} with an ordinary link, {both} with both")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=80, help="of blocks, in one repeat")
    parser.add_argument("--steps", type=int, default=10, help="in one block")
    options = parser.parse_args()
    file = result_file("elastic_cost", trial=options.repeats < 3)
    workers = run_workers(options.workers, compare, options.repeats, options.pairs, options.steps)
    found = [{"worker": worker, **each} for worker, mine in enumerate(workers) for each in mine]
    print_table(found)
    print(file.save({"options": vars(options)}, pairs=found))


if __name__ == "__main__":
    main()
