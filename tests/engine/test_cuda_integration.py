"""On a GPU: several workers share it over Gloo, staged through pinned memory, with unchanged results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.wire.operations import SIZE, own, wire_over
from tests.worlds import run_processes
from thinwire.strategies.base import Overlap, Strategy
from thinwire.wire.connect import connect

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 50


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    model = model.double().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x.cuda(), torch.randint(0, 10, (12,), generator=generator).cuda()


def train(strategy: Strategy) -> list[Tensor]:
    model, optimizer = build()
    model.eval()  # batch-norm statistics of a part of a batch are not those of the whole
    with tw.attach(model, optimizer, strategy, bucket_bytes=4096) as link:
        for number in range(STEPS):
            x, y = (t.chunk(link.world_size)[link.rank] for t in data(number))
            step(model, optimizer, x, y)
        assert link.stats.sent_bytes > 0
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
def test_training_equals_one_process(overlap: Overlap, world_size: int) -> None:
    results = run_processes(world_size, train, tw.AllReduce(overlap=overlap))
    model, optimizer = build()
    model.eval()
    for number in range(STEPS):
        step(model, optimizer, *data(number))
    for result in results:
        for ours, theirs in zip(result, model.parameters(), strict=True):
            assert (ours - theirs.cpu()).norm() < 1e-9 * theirs.cpu().norm()


def use_wire() -> None:
    lane = connect(None, timeout_s=60, silence_s=10)
    assert lane is not None
    wire = wire_over(lane)
    everyone = [own(r, torch.float32).cuda() for r in range(wire.world_size)]
    reduced = everyone[wire.rank].clone()
    wire.all_reduce_(reduced).wait()
    assert torch.equal(reduced, torch.stack(everyone).sum(0))
    part = torch.empty(SIZE // wire.world_size, device="cuda")
    wire.reduce_scatter(everyone[wire.rank], part).wait()
    assert torch.equal(part, reduced.chunk(wire.world_size)[wire.rank])
    gathered = torch.empty(SIZE * wire.world_size, device="cuda")
    wire.all_gather(everyone[wire.rank], gathered).wait()
    assert torch.equal(gathered, torch.cat(everyone))
    inbox, peer = torch.empty(SIZE, device="cuda"), (wire.rank + 1) % wire.world_size
    source = (wire.rank - 1) % wire.world_size
    wire.exchange(send=everyone[wire.rank], to=peer, recv=inbox, source=source, tag=3).wait()
    assert torch.equal(inbox, everyone[source])
    wire.all_reduce_(torch.zeros(1)).wait()
    lane.close()


def test_every_operation_is_staged() -> None:
    run_processes(3, use_wire)


def train_with_scaler() -> list[float]:
    """Half-precision forward, scaled loss, gradients unscaled after the reduction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler, losses = torch.amp.GradScaler("cuda"), []
    with tw.attach(model, optimizer, tw.AllReduce()) as link:
        generator = torch.Generator().manual_seed(link.rank)
        for _ in range(60):
            x = torch.randn(32, 16, generator=generator).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        assert link.consensus_distance() == 0
    return losses


def test_grad_scaler_and_clipping() -> None:
    for losses in run_processes(2, train_with_scaler):
        assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
