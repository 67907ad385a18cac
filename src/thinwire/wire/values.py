"""Plain values of all workers of the default process group, as JSON.

Torch's own collectives of objects unpickle what comes from the network, which runs whatever it says.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_values(value: Any) -> list[Any]:
    """Every worker's value, in order of rank; called by all."""
    # a group with NCCL alone has nothing for the CPU
    device = (
        "cpu" if "cpu:" in dist.get_backend_config() else torch.device("cuda", torch.cuda.current_device())
    )
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([data.numel()], device=device))
    sizes = [int(each) for each in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [json.loads(row[:size].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
