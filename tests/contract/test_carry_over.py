"""A strategy's state follows its parameters: to other buckets, other numbers of workers, smaller shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_threads
from thinwire.wire.local import LocalLane

MIB = 1 << 20
STRATEGIES = [
    tw.GTopK(density=0.01),
    tw.TopK(density=0.01, momentum=0.9),
    tw.OkTopK(density=0.02),
    tw.GossipGraD(payload="int8"),
    tw.StochasticGradientPush(payload="int8"),
]


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 16))
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(4, 256, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    (model(x) - x.sin()[:, :16]).square().mean().backward()
    optimizer.step()


def run(lane: LocalLane, strategy: tw.Strategy, folder: Path, bucket_bytes: int, steps: range) -> Any:
    """Go on from the folder's checkpoint, if any, for some steps, and save; the state after loading."""
    model, optimizer = parts()
    with (
        tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=bucket_bytes) as link,
        tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
    ):
        checkpoint.load()
        loaded = link.state_dict()
        for number in steps:
            step(model, optimizer, number, lane.rank)
        checkpoint.save(steps.stop)
        saved = link.state_dict()
    assert all(p.isfinite().all() for p in model.parameters())
    return loaded, saved, len(link._core.buckets)


def total(states: list[dict[str, Any]], leaf: str) -> dict[str, Tensor]:
    """The sum of a leaf over all workers, by parameter."""
    found = [state["leaves"].get(leaf, {}) for state in states]
    return {name: sum((each[name] for each in found), torch.zeros(())) for name in found[0]}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_checkpoint_goes_on_with_other_buckets_and_workers(
    strategy: tw.Strategy, workers: int, tmp_path: Path
) -> None:
    first = run_threads(4, lambda lane: run(lane, strategy, tmp_path, MIB, range(6)))
    second = run_threads(workers, lambda lane: run(lane, strategy, tmp_path, 25 * MIB, range(6, 9)))
    assert first[0][2] > second[0][2], "other buckets"
    assert all(loaded["steps"] == 6 for loaded, _, _ in second)
    for leaf in ("residual", "velocity"):
        before = total([saved for _, saved, _ in first], leaf)
        after = total([loaded for loaded, _, _ in second], leaf)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert (after[name] - value).norm() <= 1e-12 * value.norm()
    third = run_threads(workers, lambda lane: run(lane, strategy, tmp_path, MIB, range(9, 10)))
    assert all(loaded["steps"] == 9 for loaded, _, _ in third)


def test_the_same_buckets_go_on_bit_for_bit(tmp_path: Path) -> None:
    """What belongs to no parameter (thresholds, weights, kept indices) is carried over too."""
    strategy = tw.GTopK(density=0.01)
    run_threads(2, lambda lane: run(lane, strategy, tmp_path / "stopped", MIB, range(8)))
    stopped = run_threads(2, lambda lane: run(lane, strategy, tmp_path / "stopped", MIB, range(8, 12)))
    straight = run_threads(2, lambda lane: run(lane, strategy, tmp_path / "straight", MIB, range(12)))
    for (_, ours, _), (_, theirs, _) in zip(stopped, straight, strict=True):
        for name, value in theirs["leaves"]["residual"].items():
            assert torch.equal(ours["leaves"]["residual"][name], value)


@pytest.mark.parametrize("strategy", [tw.AllReduce(), tw.GTopK(density=0.01), tw.GossipGraD()], ids=repr)
def test_a_model_shrinks_while_attached(strategy: tw.Strategy) -> None:
    """Half of the hidden units go, on all workers at once; residuals keep the rows and columns that are
    left."""
    kept = torch.arange(0, 512, 2)

    def worker(lane: LocalLane) -> tuple[Any, Any, int, list[Tensor]]:
        model, optimizer = parts()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=MIB) as link:
            for number in range(8):
                step(model, optimizer, number, lane.rank)
            before = link.state_dict()
            with torch.no_grad():
                for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
                    parameter = model.get_parameter(name)
                    parameter.grad = None
                    parameter.data = parameter.data.index_select(dim, kept)
            link.reshape({"0.weight": [kept, None], "0.bias": [kept], "2.weight": [None, kept]})
            after, sent = link.state_dict(), link.stats.sent_bytes
            for number in range(8, 12):
                step(model, optimizer, number, lane.rank)
            assert link.stats.steps == 12
            assert link.stats.sent_bytes > sent
        return before, after, link.stats.sent_bytes, [p.detach() for p in model.parameters()]

    results = run_threads(2, worker)
    for before, after, _, _ in results:
        for name, value in before["leaves"].get("residual", {}).items():
            if name == "0.weight":
                value = value[kept]
            if name == "2.weight":
                value = value[:, kept]
            assert torch.equal(after["leaves"]["residual"][name], value)
    if strategy.replicas_agree:
        assert all(torch.equal(a, b) for a, b in zip(results[0][3], results[1][3], strict=True))
