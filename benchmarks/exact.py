"""Exact SGD: thinwire's AllReduce against torch's DDP, and what the engine costs the processor.

    python -m benchmarks.exact            about 15 minutes on 2 quiet cores
    python -m benchmarks.exact --quick    about 2 minutes; shows that it works, not a result

Part 1, loopback: little to hide, so what shows is the engine's own cost. Part 2, shaped paths: see
exact_shaped.py. Part 3, the processor: see engine_cost.py. In parts 1 and 2 every worker trains the same
emulated accelerator: layers that sleep like a GPU would, gradients that travel for real over Gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks import engine_cost, exact_shaped
from benchmarks.blocks import CEILING, MIB, Block, Config, Contender, of_everyone, run_blocks, table
from benchmarks.provenance import provenance, run_workers, save

SIZE = 4 * MIB
CONTENDERS = (
    Contender(name="DDP", bucket_bytes=SIZE),
    Contender(name="DDP, gradients as views", bucket_bytes=SIZE, views=True),
    Contender(name="AllReduce forward", strategy=tw.AllReduce(overlap="forward")),
    Contender(name="AllReduce backward", bucket_bytes=SIZE, strategy=tw.AllReduce(overlap="backward")),
    Contender(name="AllReduce none", bucket_bytes=SIZE, strategy=tw.AllReduce(overlap="none")),
    CEILING,
)
NET = "params=6e6,layers=24,forward=0.1,backward=0.2"


def loopback_worker(config: Config) -> list[Block]:
    """What one worker of the world does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    blocks = run_blocks(CONTENDERS, config)
    dist.destroy_process_group()
    return blocks


def measure_loopback(config: Config, world_sizes: Sequence[int]) -> dict[str, Any]:
    """One table per world size, and all there is to keep."""
    raw: dict[str, Any] = {}
    for world_size in world_sizes:
        print(f"loopback: {world_size} workers, {config.turns} turns ...", file=sys.stderr, flush=True)
        blocks = of_everyone(run_workers(world_size, loopback_worker, config))
        raw[str(world_size)] = [dataclasses.asdict(block) for block in blocks]
        print(f"\n### Loopback, {world_size} workers\n")
        print("\n".join(table(blocks, CONTENDERS, "DDP")), flush=True)
    return {"config": dataclasses.asdict(config), "blocks": raw}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact", description=(__doc__ or "").split("\n")[0]
    )
    parts = ("loopback", "shaped", "processor")
    parser.add_argument("--quick", action="store_true", help="few and short blocks, to see that it works")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="world sizes (default: 2 4)")
    parser.add_argument("--turns", type=int, default=6, help="times each contender has its turn (default: 6)")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    arguments = parse()
    config = Config(net=NET, turns=arguments.turns)
    shaped_config = dataclasses.replace(exact_shaped.CONFIG, turns=arguments.turns)
    cost_config = engine_cost.Config()
    if arguments.quick:
        config = dataclasses.replace(config, turns=3, steps=2)
        shaped_config = dataclasses.replace(shaped_config, turns=2, steps=2)
        cost_config = dataclasses.replace(cost_config, turns=3, steps=2)

    result: dict[str, Any] = {"begin": provenance()}
    print("## benchmarks/exact.py" + (" (quick: not a result)" if arguments.quick else ""))
    print("\nMedian, with quartiles in parentheses.", flush=True)
    if "loopback" in arguments.parts:
        result["loopback"] = measure_loopback(config, arguments.workers)
    if "shaped" in arguments.parts:
        result["shaped"] = exact_shaped.measure(shaped_config, arguments.workers)
    if "processor" in arguments.parts:
        result["engine_cost"] = engine_cost.measure(cost_config)
    result["end"] = provenance()
    print(f"\nsaved {save('exact', result, trial=arguments.quick)}", file=sys.stderr)


if __name__ == "__main__":
    main()
