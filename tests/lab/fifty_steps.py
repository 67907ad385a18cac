"""One worker of a lab trains digits-cnn for fifty steps and keeps what it ends with.

    python -m tests.lab.fifty_steps FOLDER

FOLDER has the strategies and the weights to start from (task.pt).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.simulate.training import for_real


def main() -> None:
    folder = Path(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    strategies, start = torch.load(folder / "task.pt", weights_only=False)
    ends = [for_real(each, None, rank, world_size, start, dropout=True) for each in strategies]
    torch.save(ends, folder / f"{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
