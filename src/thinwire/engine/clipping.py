"""The norm of gradients of which each worker holds a part, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.engine.buckets import local
from thinwire.engine.replica_group import ReplicaGroup


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A gradient of this worker, and how many workers hold the same one."""

    gradient: Tensor
    num_holders: int


def replica_parts(model: nn.Module, groups: Sequence[ReplicaGroup], world_size: int) -> list[GradientPart]:
    """The gradients of a model of which groups of replicas hold parts."""
    holders = {
        id(p): world_size if group.ranks is None else len(group.ranks)
        for group in groups
        for bucket in group.buckets
        for p in bucket.parameters
    }
    held = [(p.grad, holders.get(id(p), world_size)) for p in model.parameters()]
    return [GradientPart(gradient, num) for gradient, num in held if gradient is not None]


@torch.no_grad()
def clip_parts(
    parts: Sequence[GradientPart],
    max_norm: float,
    norm_type: float,
    everyones: Callable[[Tensor], Tensor],
) -> Tensor:
    """Clip gradients to `max_norm` over all workers, and return the norm before.

    `everyones` gathers a number from every worker. A gradient that k workers hold counts 1 / k on each; where
    replicas differ this is their mean square. torch's own function cannot stack norms of tensors and of
    DTensors.
    """
    norms = [(torch.linalg.vector_norm(local(p.gradient), norm_type).double(), p.num_holders) for p in parts]
    device = norms[0][0].device if norms else torch.device("cpu")
    if math.isinf(norm_type):
        mine = max((norm.cpu() for norm, _ in norms), default=torch.zeros((), dtype=torch.float64))
        total = everyones(mine.reshape(1)).max()
    else:
        shares = [norm.cpu() ** norm_type / holders for norm, holders in norms]
        mine = torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
        total = everyones(mine.reshape(1)).sum() ** (1 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in parts:
        local(part.gradient).mul_(scale.to(part.gradient.dtype).to(part.gradient.device))
    return total.to(device)
