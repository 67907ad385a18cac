"""What torch's Gloo does by itself, without our code: what a group leaves behind, and what ends a receive.

    python -m benchmarks.gloo_facts --groups 600

`groups`: two processes make a group, sum one number in it and drop it, again and again; read are the resident
memory, open files and threads of the one that does not host the store. Dropped with nothing under way, or by
one process while the other receives from it. `receives`: three processes, of which one is killed while
another waits to receive from it, or from whoever comes; how long that takes to end.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import signal
import socket
import time
from statistics import linear_regression
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs
from torch.distributed.distributed_c10d import PrefixStore, Store

from benchmarks.churn_processes import read_open
from benchmarks.common import parser_of, print_head, print_row, result_file

TIMEOUT_S = 10.0
DIES_AFTER_S = 1.0
WARM_UP = 0.2
"""Part of the groups that is not counted: allocators and caches fill."""


def store_of(rank: int, port: int, size: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, size, rank == 0)


def group_of(store: Store, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=TIMEOUT_S))


def make_groups(rank: int, port: int, count: int, breaks: bool, told: Any) -> None:
    """One of two processes; the second tells what it has open, now and then. `breaks`: it receives from the
    first one, which drops the group."""
    torch.set_num_threads(1)
    store = store_of(rank, port, 2)
    for number in range(count + 1):
        if number % max(1, count // 20) == 0 and rank == 1:
            gc.collect()
            told.put({"groups": number, **read_open(os.getpid())})
        group = group_of(PrefixStore(str(number), store), rank, 2)
        group.allreduce([torch.ones(1)]).wait()
        if breaks and rank == 1:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], 0, 5).wait()
        del group
    if rank == 1:
        store.set("done", "")
    else:
        store.wait(["done"])


def receive(rank: int, port: int, anyone: bool, told: Any) -> None:
    """One of three processes: the first receives, the second lives and sends nothing, the third is killed."""
    torch.set_num_threads(1)
    group = group_of(store_of(rank, port, 3), rank, 3)
    group.allreduce([torch.ones(1)]).wait()
    if rank == 2:
        time.sleep(DIES_AFTER_S)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
        return
    inbox, began_s = torch.zeros(1), time.monotonic()
    handle = group.recv_anysource([inbox], 5) if anyone else group.recv([inbox], 2, 5)
    try:
        handle.wait()
        how = "a message"
    except RuntimeError as error:
        how = str(error).rpartition("] ")[2].partition(". ")[0]
    told.put({"after_s": round(time.monotonic() - began_s - DIES_AFTER_S, 3), "how": how})


def run(size: int, work: Any, *args: Any) -> list[dict[str, Any]]:
    """Run processes; what one of them has told."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [context.Process(target=work, args=(rank, port, *args, told)) for rank in range(size)]
    for each in processes:
        each.start()
    last = processes[1] if work is make_groups else processes[0]
    found = []
    while last.is_alive() or not told.empty():
        if told.empty():
            time.sleep(0.05)
        else:
            found.append(told.get())
    for each in processes:
        each.kill()
        each.join()
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--groups", type=int, default=600)
    options = parser.parse_args()
    file = result_file("gloo_facts", trial=options.groups < 500)
    readings = []
    print_head("of torch's Gloo alone: a group that", "leaves behind KiB", "descriptors", "threads")
    for breaks in (False, True):
        how = "breaks while one receives" if breaks else "is dropped at rest"
        some = [{"group": how, **each} for each in run(2, make_groups, options.groups, breaks)]
        counted = [each for each in some if each["groups"] >= WARM_UP * options.groups]
        numbers = [each["groups"] for each in counted]
        slopes = [
            linear_regression(numbers, [each[key] for each in counted]).slope
            for key in ("kib", "descriptors", "threads")
        ]
        print_row(how, *(f"{slope:.4f}" for slope in slopes))
        readings += some
    print_head("a receive of which the sender is killed", "ends after, s", "with")
    receives = []
    for anyone in (False, True):
        [ended] = run(3, receive, anyone)
        receives.append({"from": "whoever comes" if anyone else "the one that is killed", **ended})
        print_row(*receives[-1].values())
    print(file.save({"options": vars(options), "timeout_s": TIMEOUT_S}, readings=readings, receives=receives))


if __name__ == "__main__":
    main()
