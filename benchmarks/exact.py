"""Exact SGD: thinwire's AllReduce against torch's DDP, and the processor time of the engine.

    python -m benchmarks.exact            about 15 minutes on 2 quiet cores
    python -m benchmarks.exact --quick    about 2 minutes; shows that it works, not a result

Part 1, loopback: little to hide, so the engine's own cost shows. Part 2, shaped: paths so thin that an
all-reduce of the whole gradient takes 0.5, 1 or 2 times the compute of a step. DDP hides communication behind
backward only, `overlap="forward"` behind all of it: with f seconds of forward, b = 2 f of backward and c of
communication, DDP needs f + max(b, c) and "forward" max(b + f, c), which is 1.33 times less at c = b + f.
Part 3, processor: see engine_cost.py. Parts 1 and 2 train emulated accelerators, as exact_lab.py does.
"""

from __future__ import annotations

from typing import Any

from benchmarks import engine_cost
from benchmarks.common import note, parser_of, result_file
from benchmarks.exact_lab import BACKWARD, FORWARD, LabCell, measure_cell
from thinwire.lab.nets import parse_net

RATIOS = (0.5, 1.0, 2.0)
"""Seconds of communication over seconds of compute."""
SHAPED_NET = "params=3e6,layers=24,forward=0.1,backward=0.2"


def loopback_cell(workers: int) -> LabCell:
    """DDP and every overlap over loopback, all but "forward" with buckets of 4 MiB."""
    return LabCell(
        workers=workers,
        net="params=6e6,layers=24,forward=0.1,backward=0.2",
        systems=("ddp-4mb", "ddp-4mb-views", FORWARD, "all-reduce-backward-4mb", "all-reduce-none-4mb"),
        loopback=True,
    )


def shaped_cell(workers: int) -> LabCell:
    """DDP with three bucket sizes, at the rates where a ring all-reduce takes `RATIOS` times the compute."""
    net = parse_net(SHAPED_NET)
    bits = 8 * 2 * (workers - 1) / workers * net.num_params * 4
    compute_s = net.forward_s + net.backward_s
    return LabCell(
        workers=workers,
        net=SHAPED_NET,
        systems=("ddp-1mb", "ddp-4mb", "ddp-25mb", FORWARD, BACKWARD),
        rates_bits_per_s=tuple(round(bits / (ratio * compute_s)) for ratio in RATIOS),
        speed_goals={FORWARD: 1.0, BACKWARD: 1.0},
    )


def main() -> None:
    parser = parser_of(__doc__)
    parts = ("loopback", "shaped", "processor")
    parser.add_argument("--quick", action="store_true", help="few and short blocks, to see that it works")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="world sizes (default: 2 4)")
    parser.add_argument("--turns", type=int, default=6, help="blocks of each system (default: 6)")
    arguments = parser.parse_args()
    turns, block_s = (2, 0.7) if arguments.quick else (arguments.turns, 2.5)
    file, result = result_file("exact", trial=arguments.quick), dict[str, Any]()
    print("## benchmarks/exact.py" + (" (quick: not a result)" if arguments.quick else ""))
    for part, cell_of in (("loopback", loopback_cell), ("shaped", shaped_cell)):
        if part in arguments.parts:
            result[part] = [measure_cell(cell_of(n), turns=turns, block_s=block_s) for n in arguments.workers]
    if "processor" in arguments.parts:
        result["engine_cost"] = engine_cost.measure(turns=3 if arguments.quick else 15)
    note(f"\nsaved {file.save(result)}")


if __name__ == "__main__":
    main()
