"""DTensors, and groups of replicas over Gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from tests.contract.test_groups import Split, batch, check_split, in_pairs, step
from tests.worlds import run_processes

STEPS = 8


class Perceptron(nn.Module):
    """Two layers to be split, between two that all workers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.up, self.down, self.out = (
            nn.Linear(6, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 4),
        )
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).tanh()
        out: Tensor = self.out(hidden + self.down(self.up(hidden).tanh()))
        return out


def train(model: nn.Module, rows: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for number in range(STEPS):
        x, y = batch(number)
        step(model, optimizer, x[rows], y[rows])


def with_dtensors() -> list[Tensor]:
    """On a mesh of 2 x 2: the batch is split along one dimension, two layers along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Perceptron()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rows = slice(0, 4) if dist.get_rank() < 2 else slice(4, 8)
    with tw.attach(model, optimizer, tw.AllReduce(), bucket_bytes=300) as link:
        assert len(link._core.groups) == 2
        for number in range(STEPS):
            x, y = batch(number)
            step(model, optimizer, x[rows], y[rows])
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def in_pairs_of_processes() -> Split:
    return in_pairs(None, dist.get_rank(), tw.AllReduce())[0]


def both() -> tuple[list[Tensor], Split]:
    return [t.detach().clone() for t in with_dtensors()], in_pairs_of_processes()


@pytest.mark.processes
def test_groups_and_dtensors_are_exact() -> None:
    whole = Perceptron()
    train(whole, slice(None))
    results = run_processes(4, both)
    check_split([model for _, model in results])
    for tensors, _ in results:
        for ours, theirs in zip(tensors, whole.parameters(), strict=True):
            assert (ours - theirs).norm() < 1e-12 * theirs.norm()


def in_unequal_groups() -> dict[str, list[Tensor]]:
    """One model over all four workers; in between one over three of them or the fourth alone; and inside the
    three one over two of them or the third alone. Every worker's gradient is its rank plus one."""
    rank, models = dist.get_rank(), dict[str, list[Tensor]]()
    parts = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]

    def train(name: str, group: dist.ProcessGroup | None, size: int) -> None:
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=group, timeout_s=500) as link:
            assert link.world_size == size
            for number in range(3):
                optimizer.zero_grad()
                (model(torch.ones(1, 4, dtype=torch.float64)) * (rank + 1)).sum().backward()
                optimizer.step()
                if number == 1 and name == "all":
                    train("part", parts[rank == 3], 1 if rank == 3 else 3)
                elif number == 1 and name == "part" and rank < 3:
                    train("pair", pairs[rank == 1], 1 if rank == 1 else 2)
        models[name] = [model.weight.detach()]

    train("all", None, 4)
    return models


@pytest.mark.processes
def test_groups_of_unequal_size_inside_each_other() -> None:
    means = {"all": [2.5] * 4, "part": [2.0, 2.0, 2.0, 4.0], "pair": [2.0, 2.0, 2.0]}
    found = run_processes(4, in_unequal_groups)
    for name, expected in means.items():
        got = [models[name][0][0, 0].item() for models in found if name in models]
        assert got == [-3 * mean for mean in expected], name
