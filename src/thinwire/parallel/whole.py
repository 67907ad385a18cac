"""The plain model out of a split one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have if no layer were split; called by all workers.

    An ordinary model of the same shape loads it.
    """
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
