"""Gradients on a GPU, messages on the host: all workers step alike, and as they would on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_processes
from thinwire.strategies.base import Strategy

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STRATEGIES = [
    tw.TopK(density=0.01, exact=True),
    tw.GTopK(density=0.01, exact=True),
    tw.OkTopK(density=0.01, exact=True),
    tw.GTopK(density=0.01),
    tw.GTopK(density=0.01, exact=True, payload="bf16", momentum=0.9, clip_norm=0.1),
]


def weights(strategy: Strategy, device: str) -> list[Tensor]:
    """After some steps on this device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 10)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tw.attach(model, optimizer, strategy, bucket_bytes=100_000) as link:
        for step in range(20):
            generator = torch.Generator().manual_seed(100 * step + link.rank)
            inputs = torch.randn(16, 300, generator=generator, dtype=torch.float64).to(device)
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :10]).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_all_workers_step_alike(strategy: Strategy) -> None:
    ours = run_processes(3, weights, strategy, "cuda")
    for other in ours[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ours[0], other, strict=True))
    if getattr(strategy, "exact", False):  # thresholds come from samples, which may differ
        host = run_processes(3, weights, strategy, "cpu")
        for a, b in zip(ours[0], host[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
