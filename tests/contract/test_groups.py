"""Parameters that live in different groups of workers train under one optimizer and one link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_threads
from thinwire.errors import DataError, PeerDiffers, SettingError
from thinwire.wire.local import LocalLane, LocalWorld

STEPS, BATCH, FEATURES, OUTPUTS = 12, 8, 6, 4


class Split(nn.Module):
    """A body that all workers hold, and some of the head's output features."""

    def __init__(self, outputs: slice) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Linear(FEATURES, 10).double()
        self.head = nn.Linear(10, len(range(OUTPUTS)[outputs])).double()
        with torch.no_grad():
            for parameter in self.body.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            weight = torch.randn(OUTPUTS, 11, generator=generator, dtype=torch.float64)
            self.head.weight.copy_(weight[outputs, :10])
            self.head.bias.copy_(weight[outputs, 10])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh())
        return out


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sin()[:, :OUTPUTS]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().sum(1).mean().backward()
    optimizer.step()


def optimizer_of(model: Split, body_lr: float) -> torch.optim.Optimizer:
    body, head = list(model.body.parameters()), list(model.head.parameters())
    groups: list[dict[str, Any]] = [{"params": body, "lr": body_lr}, {"params": head}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def alone() -> Split:
    model = Split(slice(None))
    optimizer = optimizer_of(model, 0.02)
    for number in range(STEPS):
        step(model, optimizer, *batch(number))
    return model


def in_pairs(lane: LocalLane | None, rank: int, strategy: tw.Strategy) -> tuple[Split, int]:
    """Pairs (0, 1) and (2, 3) split the head and see half of the batch each; (0, 2) and (1, 3) are
    replicas."""
    outputs = slice(0, 2) if rank % 2 == 0 else slice(2, 4)
    model = Split(outputs)
    # the gradient of the body is the sum over the two halves of the head, of which attach takes the mean
    optimizer = optimizer_of(model, 0.04)
    ranks = {"head": [rank % 2, rank % 2 + 2]}
    with tw.attach(
        model, optimizer, strategy, process_group=lane, replica_ranks=ranks, bucket_bytes=200
    ) as link:
        for number in range(STEPS):
            x, y = batch(number)
            half = slice(0, BATCH // 2) if rank < 2 else slice(BATCH // 2, BATCH)
            step(model, optimizer, x[half], y[half][:, outputs])
        link.average_()  # which changes nothing, as all replicas agree
        sent = link.stats.sent_bytes
    return model, sent


def check_split(models: list[Split]) -> None:
    whole = alone()
    for rank, model in enumerate(models):
        outputs = slice(0, 2) if rank % 2 == 0 else slice(2, 4)
        pairs = [
            (model.body.weight, whole.body.weight),
            (model.body.bias, whole.body.bias),
            (model.head.weight, whole.head.weight[outputs]),
            (model.head.bias, whole.head.bias[outputs]),
        ]
        for ours, theirs in pairs:
            assert (ours - theirs).norm() < 1e-12 * theirs.norm()


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
def test_two_groups_under_one_link_are_exact(overlap: str) -> None:
    strategy = tw.AllReduce(overlap=overlap)  # type: ignore[arg-type]
    results = run_threads(4, lambda lane: in_pairs(lane, lane.rank, strategy))
    check_split([model for model, _ in results])


def test_a_checkpoint_keeps_the_part_of_each_worker(tmp_path: Path) -> None:
    def worker(lane: LocalLane, *, load: bool) -> list[Tensor]:
        model = Split(slice(0, 2) if lane.rank == 0 else slice(2, 4))
        optimizer = optimizer_of(model, 0.04)
        with (
            tw.attach(
                model, optimizer, tw.AllReduce(), process_group=lane, replica_ranks={"head": [lane.rank]}
            ) as link,
            tw.Checkpoint(tmp_path, link=link, model=model, optimizer=optimizer) as checkpoint,
        ):
            if load:
                assert checkpoint.load() is not None
            else:
                x, y = batch(0)
                step(model, optimizer, x, y[:, :2])
                checkpoint.save(1)
        return [p.detach() for p in model.parameters()]

    saved = run_threads(2, lambda lane: worker(lane, load=False))
    loaded = run_threads(2, lambda lane: worker(lane, load=True))
    for one, other in zip(saved, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(DataError, match="no worker holds the whole model"):
        tw.Checkpoint.read_model(tmp_path)


@pytest.mark.parametrize("strategy", [tw.GTopK(density=0.3), tw.GossipGraD()], ids=repr)
def test_replicas_of_a_part_stay_together_under_any_strategy(strategy: tw.Strategy) -> None:
    results = run_threads(4, lambda lane: in_pairs(lane, lane.rank, strategy))
    for one, other in ((0, 2), (1, 3)):
        for a, b in zip(results[one][0].parameters(), results[other][0].parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"head": [0, 2]}, r"replica_ranks of head.weight must be different ranks below 2, got \(0, 2\)"),
        ({"head": [1]}, r"replica_ranks of head.weight must be with this worker's rank 0, got \(1,\)"),
        ({"haed": [0]}, r"replica_ranks must be names of parameters or modules of the model, got \['haed'\]"),
    ],
)
def test_wrong_groups_are_refused(ranks: dict[str, list[int]], message: str) -> None:
    model, lane = Split(slice(0, 2)), LocalWorld(2).lane(0)
    with pytest.raises(SettingError, match=message):
        tw.attach(model, optimizer_of(model, 0.1), tw.AllReduce(), process_group=lane, replica_ranks=ranks)


def test_replicas_of_different_shapes_are_refused() -> None:
    def attach(lane: LocalLane) -> None:
        model = Split(slice(0, 1 + lane.rank))
        with tw.attach(
            model,
            optimizer_of(model, 0.1),
            tw.AllReduce(),
            process_group=lane,
            replica_ranks={"head": [0, 1]},
        ):
            pass

    with pytest.raises(PeerDiffers, match=r"head.weight"):
        run_threads(2, attach)
