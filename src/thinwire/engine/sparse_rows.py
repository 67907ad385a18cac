"""Gradients with a few rows only: those of `nn.Embedding(sparse=True)` and what else torch keeps sparse.

They travel beside the buckets and exact, whatever the strategy: as row numbers and rows, or, where that is
more, as a dense sum with a flag for each row. All workers end with the same rows, in the same order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire.traffic import Round
from thinwire.wire.wire import Wire


class SparseRows:
    """One parameter whose gradients are sparse."""

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.not_finite = ""
        self.refused = False
        self.mean_weight = 0.0
        """How much the workers' gradients counted in the last pass, on average."""

    async def reduce(self, weight: float, wire: Wire) -> None:
        """Overwrite the gradient with the mean over workers; none where no worker has one."""
        index, rows = self._own(weight)
        self.not_finite = "" if bool(rows.isfinite().all()) else self.name
        head = torch.tensor([index.numel(), weight, bool(self.not_finite)], dtype=torch.float64)
        heads = torch.empty(wire.world_size, 3, dtype=torch.float64)
        await wire.all_gather(head, heads.view(-1))
        self.refused = bool(heads[:, 2].any())
        self.mean_weight = float(heads[:, 1].mean())
        counts = [int(count) for count in heads[:, 0]]
        if max(counts) == 0:
            return
        gathers = self._gathered_bytes(max(counts), wire.world_size)
        share = self._gather(index, rows, counts, wire) if gathers else self._sum(index, rows, wire)
        index, rows = await share
        total = float(heads[:, 1].sum()) or 1.0
        mean = rows.fill_(math.nan) if self.refused else rows.div_(total)
        self.parameter.grad = torch.sparse_coo_tensor(
            index[None], mean, self.parameter.shape, is_coalesced=True, check_invariants=True
        )

    def _own(self, weight: float) -> tuple[Tensor, Tensor]:
        gradient = self.parameter.grad
        if gradient is None or weight == 0:
            return torch.empty(0, dtype=torch.int64), self.parameter.detach().new_empty(
                (0, *self.parameter.shape[1:])
            )
        if gradient.layout != torch.sparse_coo:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values() * weight

    def _gathered_bytes(self, most: int, world_size: int) -> bool:
        """Whether rows with their numbers are fewer bytes than a sum of everything."""
        p = self.parameter
        row_bytes = p.nbytes // len(p) + 8
        gather = Round(op="all_gather", send_bytes=most * row_bytes).traffic(0, world_size)
        dense = Round(op="all_reduce", send_bytes=p.nbytes + 4 * len(p)).traffic(0, world_size)
        return gather.sent_bytes <= dense.sent_bytes

    async def _gather(
        self, index: Tensor, rows: Tensor, counts: list[int], wire: Wire
    ) -> tuple[Tensor, Tensor]:
        most, device = max(counts), self.parameter.device
        own_index = torch.zeros(most, dtype=torch.int64, device=device)
        own_rows = rows.new_zeros((most, *rows.shape[1:]), device=device)
        own_index[: len(index)], own_rows[: len(rows)] = index, rows
        indices = own_index.new_empty(len(counts) * most)
        everyones = own_rows.new_empty((len(counts) * most, *rows.shape[1:]))
        await wire.all_gather(own_index, indices)
        await wire.all_gather(own_rows.view(-1), everyones.view(-1))
        used = [slice(rank * most, rank * most + count) for rank, count in enumerate(counts)]
        index, place = torch.cat([indices[each] for each in used]).unique(return_inverse=True)
        rows = torch.cat([everyones[each] for each in used])
        return index, rows.new_zeros((len(index), *rows.shape[1:])).index_add_(0, place, rows)

    async def _sum(self, index: Tensor, rows: Tensor, wire: Wire) -> tuple[Tensor, Tensor]:
        dense = torch.zeros_like(self.parameter, requires_grad=False)
        flags = torch.zeros(len(dense), device=dense.device)
        dense[index], flags[index] = rows, 1.0
        await wire.all_reduce_(flags)
        await wire.all_reduce_(dense)
        index = flags.nonzero().view(-1)
        return index, dense[index]


def sparse_parameters(model: nn.Module) -> set[str]:
    """The names of parameters whose gradients will be sparse."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
