"""Embeddings with sparse=True: exact with every strategy that reduces, and a few rows are a few bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

import thinwire as tw
from tests.worlds import run_threads
from thinwire.errors import NumericError, UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane

WORKERS, BATCH, STEPS = 3, 4, 6


class Words(nn.Module):
    """An embedding with sparse gradients, and with `dense` a layer after it."""

    def __init__(self, rows: int, *, dense: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(rows, 4, sparse=True, dtype=torch.float64)
        self.table.weight.data = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64) if dense else None
        if self.head is not None:
            nn.init.constant_(self.head.weight, 0.3)
            nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.table(words)
        return out.square().sum(-1) if self.head is None else self.head(out).squeeze(-1)


def words_of(step: int, rows: int) -> Tensor:
    return torch.randint(rows, (WORKERS * BATCH,), generator=torch.Generator().manual_seed(step))


def trained(
    lane: LocalLane | None, rows: int, strategy: Strategy, *, dense: bool
) -> tuple[list[Tensor], int]:
    """The weights, and the bytes that were sent."""
    model = Words(rows, dense=dense)
    optimizer: Optimizer = (SGD if dense else SparseAdam)(model.parameters(), lr=0.05)
    part = slice(None) if lane is None else slice(lane.rank * BATCH, (lane.rank + 1) * BATCH)
    with tw.attach(model, optimizer, strategy, process_group=lane) as link:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(words_of(step, rows)[part]).square().mean().backward()
            assert model.table.weight.grad is not None
            assert model.table.weight.grad.is_sparse
            optimizer.step()
        sent = link.stats.sent_bytes
    return [p.detach() for p in model.parameters()], sent


@pytest.mark.parametrize("rows", [7, 5000], ids=["summed", "gathered"])
@pytest.mark.parametrize("dense", [True, False], ids=["with a layer", "SparseAdam alone"])
def test_rows_are_averaged_exactly(rows: int, dense: bool) -> None:
    expected, _ = trained(None, rows, tw.Silent(), dense=dense)
    everyone = run_threads(WORKERS, lambda lane: trained(lane, rows, tw.AllReduce(), dense=dense))
    for weights, sent in everyone:
        assert all(torch.equal(a, b) for a, b in zip(weights, everyone[0][0], strict=True))
        for ours, theirs in zip(weights, expected, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-12
        if rows == 5000:
            assert sent < STEPS * 5000 * 4 * 8 / 20, "a twentieth of the table"


def test_rows_stay_exact_beside_a_top_k_strategy() -> None:
    strategy = tw.GTopK(density=1.0)
    expected, _ = trained(None, 50, tw.Silent(), dense=True)
    for weights, _ in run_threads(WORKERS, lambda lane: trained(lane, 50, strategy, dense=True)):
        assert float((weights[0] - expected[0]).abs().max()) < 1e-12


def test_a_worker_without_rows_and_one_with_a_weight() -> None:
    """Worker 0 counts 1 with a row of its own, worker 1 has none, worker 2 counts 3 with another row."""

    def step(lane: LocalLane) -> Tensor:
        model = Words(10, dense=True)
        optimizer = SGD(model.parameters(), lr=0.05)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane) as link:
            link.weight([1.0, 0.0, 3.0][lane.rank])
            assert model.head is not None
            ones = torch.ones(4, dtype=torch.float64)
            loss = model.head(ones).sum() * 0.0
            if lane.rank != 1:
                loss = loss + model.table(torch.tensor([lane.rank])).sum()
            loss.backward()
            gradient = model.table.weight.grad
            assert gradient is not None
            return gradient.to_dense()

    for gradient in run_threads(WORKERS, step):
        expected = torch.zeros(10, 4, dtype=torch.float64)
        expected[0], expected[2] = 0.25, 0.75
        assert torch.equal(gradient, expected)


def test_a_row_that_is_not_finite_is_refused_by_all() -> None:
    def step(lane: LocalLane) -> str:
        model = Words(10, dense=True)
        optimizer = SGD(model.parameters(), lr=0.05)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane):
            model.table.weight.register_hook(lambda gradient: gradient * (torch.nan if lane.rank == 1 else 1))
            model(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(NumericError) as caught:
                optimizer.step()
        return caught.value.message

    assert all("table.weight on worker 1" in message for message in run_threads(2, step))


def test_forward_overlap_refuses_them() -> None:
    model = Words(10, dense=True)
    with pytest.raises(UsageError, match=r"cannot send sparse gradients, as table\.weight has"):
        tw.attach(model, SGD(model.parameters(), lr=0.1), tw.AllReduce(overlap="forward"))
