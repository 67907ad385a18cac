"""What a worker computes on."""

from __future__ import annotations

import torch

from thinwire.errors import SettingError


def choose_device(asked: str, local_rank: int) -> torch.device:
    """The device for `asked` (auto, cpu or cuda); workers of a host with several GPUs take them in turn."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise SettingError(
            "device must be cpu or auto on this host: torch finds no GPU",
            hint="leave --device out, or install a torch that was built for this GPU",
        )
    if asked == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
