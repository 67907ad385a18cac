"""What does TLS cost? All-reduces and exchanges over `wire="tls"` and over Gloo, by turns.

    python -m benchmarks.tls                              # needs root, for the lab
    python -m benchmarks.tls --rates loopback --workers 2 --megabytes 1 --turns 1 --trial

An operation is timed at every worker from a meeting of all until its result is there; the slowest counts.
An exchange sends to the right and receives from the left, as gossip does.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import (
    lab_worker,
    note,
    parser_of,
    print_head,
    print_row,
    result_file,
    run_in_lab,
    run_workers,
)
from thinwire.hosts.description import describe
from thinwire.wire.base import Lane
from thinwire.wire.connect import connect
from thinwire.wire.tls.files import load, make

WIRES = ("gloo", "tls")
OPERATIONS = ("all-reduce", "exchange")
PATIENCE_S = 300.0
SMALL_BYTES = 1 << 10
SMALL_REPEATS = 20


def measure(certificate: str, num_bytes: int, turns: int) -> list[dict[str, Any]]:
    """Time everything, in one worker; the rows of the slowest worker, at all of them."""
    lanes = {name: _lane(certificate if name == "tls" else "") for name in WIRES}
    rows = []
    for size, repeats in ((num_bytes, 1), (SMALL_BYTES, SMALL_REPEATS)):
        data, inbox = torch.ones(size // 4), torch.empty(size // 4)
        for turn in range(-1, turns):  # the first one warms up
            for operation in OPERATIONS:
                for name, lane in lanes.items():
                    seconds, processor_s = _time(lane, operation, data, inbox, repeats)
                    if turn >= 0:
                        row = {"wire": name, "operation": operation, "bytes": size, "turn": turn}
                        rows.append({**row, "seconds": seconds, "processor_s": processor_s})
    for lane in lanes.values():
        lane.close()
    return rows


def _lane(certificate: str) -> Lane:
    lane = connect(None, PATIENCE_S, PATIENCE_S, load(Path(certificate)) if certificate else None)
    assert lane is not None
    return lane


def _time(lane: Lane, operation: str, data: Tensor, inbox: Tensor, repeats: int) -> tuple[float, float]:
    right, left = (lane.rank + 1) % lane.world_size, (lane.rank - 1) % lane.world_size

    def all_reduce() -> None:
        lane.collective("all_reduce", data, data).wait()

    def exchange() -> None:
        lane.exchange(send=data, to=right, recv=inbox, source=left).wait()

    call: Callable[[], None] = all_reduce if operation == "all-reduce" else exchange
    dist.barrier()
    began_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    both = torch.tensor([time.perf_counter() - began_s, time.process_time() - processor_s]) / repeats
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return float(both[0]), float(both[1])


def loopback(certificate: str, num_bytes: int, turns: int) -> list[dict[str, Any]]:
    """A worker on loopback, which torch's launcher has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(certificate, num_bytes, turns)
    dist.destroy_process_group()
    return rows


def in_lab(certificate: str, num_bytes: int, turns: int) -> None:
    """A worker in the lab."""
    with lab_worker() as control:
        rows = measure(certificate, num_bytes, turns)
        if dist.get_rank() == 0:
            control.report(rows)


def ratio(rows: list[dict[str, Any]], value: str) -> float:
    """Of TLS over Gloo in the same turn, in the middle."""
    gloo, tls = ([float(row[value]) for row in rows if row["wire"] == name] for name in WIRES)
    return statistics.median(theirs / ours for ours, theirs in zip(gloo, tls, strict=True))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="+", default=["loopback", "1gbit", "200mbit"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trial", action="store_true", help="no result")
    parser.add_argument("--worker", help="what a worker in the lab is started with")
    options = parser.parse_args()
    if options.worker:
        in_lab(*json.loads(options.worker))
        return
    saved, num_bytes = result_file("tls", trial=options.trial), int(options.megabytes * 1e6)
    found: list[dict[str, Any]] = []
    print_head("rate", "workers", "operation", "bytes", "Gloo, s", "TLS, s", "ratio", "processor")
    with tempfile.TemporaryDirectory() as folder:
        certificate = str(Path(folder) / "run.pem")
        make(Path(certificate), days=1)
        for rate in options.rates:
            for workers in options.workers:
                note(f"{rate}, {workers} workers ...")
                arguments = (certificate, num_bytes, options.turns)
                if rate == "loopback":
                    rows = run_workers(workers, loopback, *arguments)[0]
                else:
                    words = ("benchmarks.tls", "--worker", json.dumps(arguments))
                    rows = run_in_lab(describe(hosts=workers, rate=rate), *words).reports[0]
                found += [{"rate": rate, "workers": workers, **row} for row in rows]
                _print(rate, workers, rows)
                saved.save({"turns": options.turns}, rows=found)
    note(f"saved in {saved.path}")


def _print(rate: str, workers: int, rows: list[dict[str, Any]]) -> None:
    for size in dict.fromkeys(row["bytes"] for row in rows):
        for operation in OPERATIONS:
            some = [row for row in rows if (row["bytes"], row["operation"]) == (size, operation)]
            times = [
                statistics.median(row["seconds"] for row in some if row["wire"] == name) for name in WIRES
            ]
            ratios = [f"{ratio(some, value):.2f}" for value in ("seconds", "processor_s")]
            print_row(rate, workers, operation, size, *(f"{each:.4g}" for each in times), *ratios)


if __name__ == "__main__":
    main()
