"""What every strategy with local steps promises, whatever its parts are."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, batch, model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.strategies.base import Strategy
from thinwire.strategies.contrib.grouping_sgd import GroupingSGD
from thinwire.strategies.contrib.lasgd import LASGD
from thinwire.strategies.contrib.leader_sgd import LeaderSGD
from thinwire.wire.local import LocalLane

FAMILY: list[Strategy] = [
    tw.SASGD(interval=3),
    tw.DiLoCo(interval=3, fragments=3, delay=2, payload="int8"),
    tw.DiLoCo(interval=4, merge="samples", offload=True),
    tw.DiLoCo(interval=3, quorum=0.99),
    tw.Trickle(interval=4, density=0.2),
    tw.PartialAveraging(interval=3),
    tw.PostLocal(exact_steps=2, interval=3),
    tw.HierarchicalAveraging(interval=4, inner_interval=2, groups=1),
]
CENTRED: list[Strategy] = [tw.Downpour(interval=2), tw.EASGD(interval=2)]
OTHERS: list[Strategy] = [
    *CENTRED,
    tw.DiLoCo(interval=3, gossip=True),
    tw.HierarchicalAveraging(interval=4, groups=1, inside="gradients"),
    LASGD(),
    LeaderSGD(interval=4, inner_interval=2, groups=1),
    GroupingSGD(interval=2, measured_steps=2),
]
every = pytest.mark.parametrize("strategy", FAMILY, ids=repr)
all_of_them = pytest.mark.parametrize("strategy", FAMILY + OTHERS, ids=repr)


class Muon(Optimizer):
    """Orthogonalized momentum for matrices, signs for the rest: an optimizer that is linear in nothing."""

    def __init__(self, parameters: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures here
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                if p.ndim == 2:
                    u, _, v = torch.linalg.svd(buffer, full_matrices=False)
                    p.sub_(u @ v, alpha=group["lr"])
                else:
                    p.sub_(buffer.sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Muon": Muon,
}


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def attach(model: nn.Module, optimizer: Optimizer, strategy: Strategy, lane: LocalLane) -> tw.Link:
    return tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_diloco_is_its_formula_with_any_inner_optimizer(make: Callable[[Any], Optimizer]) -> None:
    workers, interval, steps = 3, 2, 7
    models = [model_and_optimizer()[0] for _ in range(workers)]
    optimizers = [make(model.parameters()) for model in models]
    anchor, velocity = flat(models[0]), torch.zeros_like(flat(models[0]))
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_once(model, optimizer, step - 1, rank)
        if step % interval == 0:
            moved = torch.stack([flat(model) for model in models]).mean(0) - anchor
            velocity = 0.9 * velocity + moved
            anchor = anchor + 0.7 * (moved + 0.9 * velocity)
            for model in models:
                torch.nn.utils.vector_to_parameters(anchor.clone(), model.parameters())

    def train(lane: LocalLane) -> tuple[Tensor, list[Any]]:
        model, _ = model_and_optimizer()
        optimizer = make(model.parameters())
        with attach(model, optimizer, tw.DiLoCo(interval=interval, outer_lr=0.7), lane):
            for step in range(steps):
                step_once(model, optimizer, step, lane.rank)
            return flat(model), list(optimizer.state.values())

    for model, optimizer, (ours, own) in zip(models, optimizers, run_threads(workers, train), strict=True):
        assert (ours - flat(model)).norm() <= 1e-9 * ours.norm()
        for state, expected in zip(own, optimizer.state.values(), strict=True):
            for name, value in state.items():  # kept, and never averaged
                if isinstance(value, Tensor):
                    assert torch.allclose(value, expected[name], rtol=1e-9)


@every
@pytest.mark.parametrize("name", ["momentum", "AdamW", "Muon"])
def test_workers_stay_together_with_any_inner_optimizer(strategy: Strategy, name: str) -> None:
    def train(lane: LocalLane, strategy: Strategy) -> float:
        model, _ = model_and_optimizer()
        optimizer = OPTIMIZERS[name](model.parameters())
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(24):
                step_once(model, optimizer, step, lane.rank)
            assert bool(flat(model).isfinite().all())
            return link.consensus_distance()

    together, alone = (run_threads(3, partial(train, strategy=each))[0] for each in (strategy, tw.Silent()))
    assert together < 0.8 * alone


@every
def test_intervals_count_optimizer_steps_not_backward_passes(strategy: Strategy) -> None:
    """Four backward passes for a step are one step: the same as one pass over their samples."""

    def train(lane: LocalLane, parts: int) -> Tensor:
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(7):
                x, y = batch(step, lane.rank)
                optimizer.zero_grad()
                for part in range(parts):
                    mine = slice(part, None, parts)
                    loss = (model(x[mine]) - y[mine]).square().mean() / parts
                    if part < parts - 1:
                        with link.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
                optimizer.step()
            link.synchronize()
            return flat(model)

    whole, accumulated = (run_threads(2, partial(train, parts=parts)) for parts in (1, 4))
    for a, b in zip(whole, accumulated, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()  # a rounded message may round the other way


@all_of_them
def test_mixed_precision(strategy: Strategy) -> None:
    """Half-precision forward, scaled gradients: as close to the same in float32 as rounding allows."""

    def train(lane: LocalLane, amp: bool) -> Tensor:
        model = model_and_optimizer()[0].float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(12):
                x, y = (data.float() for data in batch(step, lane.rank))
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    loss = (model(x) - y).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if strategy in OTHERS:
                    link.synchronize()  # two runs are alike, also where nobody waits for anybody
            assert link.stats.steps == 12
        return flat(model)

    halves, plain = (run_threads(2, partial(train, amp=amp)) for amp in (True, False))
    assert torch.equal(halves[0], halves[1])  # all leave with the mean
    assert (halves[0] - plain[0]).norm() < 0.1 * plain[0].norm()


@all_of_them
def test_the_end_may_be_in_the_middle_of_an_interval(strategy: Strategy) -> None:
    """Steps after the last interval are not lost: everyone leaves with the mean of all models."""

    def train(lane: LocalLane) -> tuple[Tensor, Tensor]:
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(5):
                step_once(model, optimizer, step, lane.rank)
            link.synchronize()
            before = flat(model)
        return before, flat(model)

    everyone = run_threads(3, train)
    mean = torch.stack([before for before, _ in everyone]).mean(0)
    for _, after in everyone:
        assert (after - mean).norm() <= 1e-12 * mean.norm()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


@all_of_them
def test_buffers_stay_with_their_worker_and_are_averaged_with_the_model(strategy: Strategy) -> None:
    def train(lane: LocalLane) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Normed().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = {}
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(5):
                x, y = batch(step, lane.rank)
                optimizer.zero_grad()
                (model(x + lane.rank) - y).square().mean().backward()
                optimizer.step()
            link.synchronize()
            seen["own"], seen["weights"] = model.norm.running_mean.clone(), flat(model)  # type: ignore[union-attr]
            with link.averaged():
                seen["averaged"], seen["mean"] = model.norm.running_mean.clone(), flat(model)  # type: ignore[union-attr]
            seen["again"], seen["weights again"] = model.norm.running_mean.clone(), flat(model)  # type: ignore[union-attr]
        seen["left"] = model.norm.running_mean.clone()  # type: ignore[union-attr]
        return seen

    everyone = run_threads(2, train)
    mean = torch.stack([seen["own"] for seen in everyone]).mean(0)
    weights = torch.stack([seen["weights"] for seen in everyone]).mean(0)
    assert not torch.allclose(everyone[0]["own"], everyone[1]["own"])
    for seen in everyone:
        assert torch.equal(seen["own"], seen["again"])
        assert torch.equal(seen["weights"], seen["weights again"])
        assert torch.allclose(seen["averaged"], mean, rtol=1e-12)
        assert torch.allclose(seen["mean"], weights, rtol=1e-12)
        assert torch.allclose(seen["left"], mean, rtol=1e-12)


@all_of_them
def test_averaging_in_the_middle_gives_all_the_mean_and_training_goes_on(strategy: Strategy) -> None:
    """`average_` is not a step: what all have in common stays as it was, on all of them."""

    def train(lane: LocalLane) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        model, optimizer = model_and_optimizer()
        common = []
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(5):
                step_once(model, optimizer, step, lane.rank)
            link.synchronize()
            before = flat(model)
            common.append(link.state_dict()["leaves"])
            link.average_()
            after = flat(model)
            common.append(link.state_dict()["leaves"])
            assert link.stats.steps == 5
            for step in range(5, 12):
                step_once(model, optimizer, step, lane.rank)
            assert bool(flat(model).isfinite().all())
        return before, after, common

    everyone = run_threads(3, train)
    mean = torch.stack([before for before, *_ in everyone]).mean(0)
    for _, after, (first, second) in everyone:
        assert (after - mean).norm() <= 1e-12 * mean.norm()
        for leaf in ("anchor", "centre", "velocity"):
            for name, value in first.get(leaf, {}).items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[leaf][name]))


def _resumed(lane: LocalLane, strategy: Strategy, folder: Path, steps: range) -> tuple[Any, Any]:
    """Go on from the folder's checkpoint, if any; the state after loading, and at the end."""
    model, optimizer = model_and_optimizer()
    with (
        attach(model, optimizer, strategy, lane) as link,
        tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
    ):
        checkpoint.load()
        loaded = link.state_dict()
        for step in steps:
            step_once(model, optimizer, step, lane.rank)
        checkpoint.save(steps.stop)
        return loaded, link.state_dict()


@every
@pytest.mark.parametrize("workers", [2, 4])
def test_another_number_of_workers_goes_on_in_the_middle_of_an_interval(
    strategy: Strategy, workers: int, tmp_path: Path
) -> None:
    """What is common to all is the same on all of them; of what waits to be sent, the sum is kept."""
    before = run_threads(3, lambda lane: _resumed(lane, strategy, tmp_path, range(5)))
    after = run_threads(workers, lambda lane: _resumed(lane, strategy, tmp_path, range(5, 9)))
    saved, loaded = [state["leaves"] for _, state in before], [state["leaves"] for state, _ in after]
    assert all(state["steps"] == 5 for state, _ in after)
    for leaf in ("anchor", "velocity"):
        for name, value in saved[0].get(leaf, {}).items():
            assert all(torch.equal(each[leaf][name], value) for each in (*saved, *loaded))
    for name in saved[0].get("residual", {}):
        total, kept = (sum(each["residual"][name] for each in leaves) for leaves in (saved, loaded))
        assert torch.allclose(torch.as_tensor(total), torch.as_tensor(kept), atol=1e-12)
    end = [state["leaves"] for _, state in after]
    for name, value in end[0].get("anchor", {}).items():
        assert all(torch.equal(each["anchor"][name], value) for each in end)


@pytest.mark.parametrize("strategy", CENTRED, ids=repr)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_centre_is_asked_once_in_an_interval_of_optimizer_steps(strategy: Strategy, parts: int) -> None:
    def train(lane: LocalLane) -> tuple[int, int]:
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(7):
                x, y = batch(step, lane.rank)
                optimizer.zero_grad()
                for part in range(parts):
                    (model(x[part::parts]) - y[part::parts]).square().mean().backward()
                optimizer.step()
                link.synchronize()
            return int(link.stats.instruments["asked"]), len(link._core.buckets)

    for asked, num_buckets in run_threads(3, train):
        assert asked == 7 // 2 * num_buckets


@pytest.mark.parametrize("strategy", CENTRED, ids=repr)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_centre_goes_on_from_a_checkpoint_with_any_number_of_workers(
    strategy: Strategy, workers: int, tmp_path: Path
) -> None:
    """Saved in the middle of an interval: all workers begin with the centre as its owners had it."""
    before = run_threads(3, lambda lane: _resumed(lane, strategy, tmp_path, range(5)))
    after = run_threads(workers, lambda lane: _resumed(lane, strategy, tmp_path, range(5, 9)))
    owned = [state["leaves"]["centre"] for _, state in before]
    assert all(state["steps"] == 5 for state, _ in after)
    for name, value in owned[0].items():
        everywhere = [
            *(each[name] for each in owned),
            *(state["leaves"]["centre"][name] for state, _ in after),
        ]
        assert all(torch.equal(each, value) for each in everywhere)
    ends = [state["leaves"]["centre"] for _, state in after]
    assert all(torch.equal(end[name], value) for end in ends for name, value in ends[0].items())
    assert any(not torch.equal(ends[0][name], value) for name, value in owned[0].items()), "it was asked"


def test_asynchronous_easgd_with_one_worker_is_its_recursion() -> None:
    """One worker trains, the other one only answers for its half of the centre."""
    steps, pull = 12, 0.3
    done = False

    def train(lane: LocalLane) -> tuple[Tensor, Tensor]:
        nonlocal done
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, tw.EASGD(interval=1, pull=pull), lane) as link:
            for step in range(steps if lane.rank == 0 else 0):
                step_once(model, optimizer, step, 0)
                while not all(each.task.returning.done() for each in link._core.mixer._pending):
                    time.sleep(0.0005)
            done |= lane.rank == 0
            while not done:
                time.sleep(0.001)
            centre = link.state_dict()["leaves"]["centre"]
            seen = flat(model), torch.cat([centre[name].view(-1) for name, _ in model.named_parameters()])
            link.average_()  # both, whatever steps they have made: detach has nothing left to do
            return seen

    ours, centre = run_threads(2, train)[0]
    model, optimizer = model_and_optimizer()
    c, e = flat(model), torch.zeros_like(flat(model))
    for step in range(steps):
        x, y = batch(step, 0)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        torch.nn.utils.vector_to_parameters(flat(model) - e, model.parameters())  # before the local step
        optimizer.step()
        e = pull * (flat(model) - c)
        c = c + e
    last = flat(model) - e
    assert (ours - last).norm() <= 1e-9 * last.norm()
    assert (centre - c).norm() <= 1e-9 * c.norm()
