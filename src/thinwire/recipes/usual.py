"""What most recipes train with: AdamW, a learning rate that goes up and down, cross-entropy, accuracy."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from thinwire.recipes.base import Plan


def adamw(model: nn.Module, plan: Plan, *, rate_at_64: float) -> Optimizer:
    """AdamW whose learning rate grows with the square root of the global batch size."""
    rate = rate_at_64 * (plan.global_batch_size / 64) ** 0.5
    return AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def one_cycle(optimizer: Optimizer, plan: Plan) -> LRScheduler:
    """Up for a fifth of the run, one step at least, then down to nothing."""
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    total = plan.num_steps + 1
    return OneCycleLR(
        optimizer, peaks, total_steps=total, pct_start=max(0.2, 2 / total), cycle_momentum=False
    )


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the batch."""
    return nn.functional.cross_entropy(outputs, targets)


def num_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many samples of the batch got their class right."""
    return (outputs.argmax(dim=1) == targets).sum()
