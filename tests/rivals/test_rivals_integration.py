"""Every rival really trains: two processes with different data agree, and get better together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.rivals import all_rivals, find
from tests.exact.compare import once
from tests.worlds import run_processes

pytestmark = pytest.mark.processes
STEPS = {"post-local-sgd": 35}
"""Steps after which all workers agree: post-local SGD averages after 3, 11, ..., 35; the others by 32."""


Trained = tuple[list[torch.Tensor], float, float]
"""Parameters, first and last loss on all points."""


def _train(name: str) -> Trained:
    """Fit half of a plane's points each."""
    rank = dist.get_rank()
    points = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    targets = points @ torch.arange(8.0) + 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    mine = slice(rank, None, 2)

    def loss_on_all() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(model(points).squeeze(1), targets))

    before = loss_on_all()
    with find(name).join(model, optimizer) as (joined, stepper):
        for _ in range(STEPS.get(name, 32)):
            stepper.zero_grad()
            torch.nn.functional.mse_loss(joined(points[mine]).squeeze(1), targets[mine]).backward()
            stepper.step()
    return [p.detach().clone() for p in model.parameters()], before, loss_on_all()


def _train_each(names: list[str]) -> dict[str, Trained]:
    """Train every rival in one worker process, since starting it takes longer than training."""
    return {name: _train(name) for name in names}


@once
def _world() -> list[dict[str, Trained]]:
    return run_processes(2, _train_each, [name for name in all_rivals() if find(name).available() is None])


@pytest.mark.parametrize("name", list(all_rivals()))
def test_two_workers_train_together(name: str) -> None:
    reason = find(name).available()
    if reason is not None:
        pytest.skip(reason)
    (first, before, after), (second, _, _) = (results[name] for results in _world())
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert after < 0.5 * before
