"""What workers agree on at an event: what goes, that each of them can do it, and one outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.moments import measure
from thinwire.apoptosis.plan import Limits, decode, encode, find_removals
from thinwire.apoptosis.surgery import Kept, Removal, check_state
from thinwire.apoptosis.units import Group
from thinwire.apoptosis.workers import Workers
from thinwire.errors import ThinwireError, UsageError


def agree(
    link: Workers,
    model: nn.Module,
    groups: Sequence[Group],
    calls: Sequence[Call],
    limits: Limits,
) -> list[Removal]:
    """What rank 0 decides, from the data of all workers, on every worker."""
    table, everyone = measure(model, groups, calls), link.everyone
    found: list[Removal] = []
    if link.world_size > 1:
        flat = [moments.flat() for moments in table.values()]
        # the products were computed in the numbers of the model, and need no more to be sent
        exact = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        everyone.sum_(whole := torch.cat([*flat, torch.empty(0)]).to(exact))
        for moments, part in zip(table.values(), whole.split([len(each) for each in flat]), strict=True):
            moments.set_(part.double())
    if link.rank == 0:
        found = find_removals(model, groups, table, limits)
    if link.world_size > 1:
        described, numbers = encode(groups, found)
        described = everyone.gather_objects(described)[0]
        if link.rank != 0:
            found, numbers = decode(groups, described)
        everyone.broadcast_tensors_(numbers, 0)
    return found


def check_all(link: Workers, model: nn.Module, optimizers: Sequence[Optimizer], kept: Kept) -> None:
    """Raise UsageError on all workers, before anything is changed, if one of them cannot do it."""
    failure = ""
    try:
        check_state(model, optimizers, kept)
    except ThinwireError as error:
        failure = str(error)
    for rank, other in enumerate(link.everyone.gather_objects(failure)):
        if other:
            raise UsageError(f"worker {rank} cannot remove neurons: {other}")


def make_alike(link: Workers, model: nn.Module) -> None:
    """Where processors round differently, what was folded in may differ in its last bit."""
    if link.world_size == 1:
        return
    tensors = [*model.parameters(), *model.buffers()]
    if len(set(link.everyone.gather_objects(_digest(tensors)))) > 1:
        link.everyone.broadcast_tensors_(tensors, 0)


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
