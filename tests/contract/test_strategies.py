"""What every strategy promises, whatever it sends."""

from __future__ import annotations

import dataclasses
import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.contract.table import BY_THE_CLOCK, EXACT, IN_GROUPS, STRATEGIES
from tests.contract.training import (
    BATCH,
    BUCKET_BYTES,
    STEPS,
    Outcome,
    batch,
    model_and_optimizer,
    played_traffic,
    step_once,
    train,
)
from tests.exact.compare import once
from tests.worlds import run_threads
from thinwire.errors import DataError, PeerLost
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic
from thinwire.wire.base import Lane
from thinwire.wire.local import LocalLane, LocalWorld

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES + BY_THE_CLOCK + IN_GROUPS, ids=repr)
every_repeatable = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
every_world = pytest.mark.parametrize("world_size", [2, 3, 4])


@once
def trained(strategy: Strategy, world_size: int) -> list[Outcome]:
    """One training in threads, which several tests look at."""
    return run_threads(world_size, lambda lane: train(strategy, lane))


@every_strategy
def test_is_a_frozen_value(strategy: Any) -> None:
    assert strategy == dataclasses.replace(strategy)
    assert hash(strategy) == hash(dataclasses.replace(strategy))
    for field in dataclasses.fields(strategy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, None)


@every_strategy
def test_a_world_of_one_trains_like_plain_torch_and_sends_nothing(strategy: Strategy) -> None:
    outcome = train(strategy, None)
    assert outcome.counted == Traffic()
    assert played_traffic(strategy, 1) == [Traffic()]
    if isinstance(strategy, tw.DiLoCo):
        return  # an optimizer of its own, also alone
    model, optimizer = model_and_optimizer()
    losses = [step_once(model, optimizer, step, 0) for step in range(STEPS)]
    assert outcome.losses == losses


@every_repeatable
@every_world
def test_traffic_played_from_sizes_is_what_is_counted(strategy: Strategy, world_size: int) -> None:
    counted = [outcome.counted for outcome in trained(strategy, world_size)]
    assert counted == played_traffic(strategy, world_size)


@every_repeatable
@every_world
def test_same_seed_same_bits(strategy: Strategy, world_size: int) -> None:
    again = run_threads(world_size, lambda lane: train(strategy, lane))
    for a, b in zip(trained(strategy, world_size), again, strict=True):
        assert a.losses == b.losses
        assert all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))


@every_strategy
@every_world
def test_replicas_agree_where_promised(strategy: Strategy, world_size: int) -> None:
    outcomes = trained(strategy, world_size)
    same = all(
        torch.equal(x, y) for o in outcomes for x, y in zip(o.weights, outcomes[0].weights, strict=True)
    )
    if strategy.replicas_agree:
        assert same
        assert outcomes[0].distance < 1e-12
    elif world_size > 2:  # two that synchronize by a swap have the same mean
        assert not same
        assert outcomes[0].distance > 1e-12


@pytest.mark.parametrize("strategy", EXACT, ids=repr)
@every_world
def test_exact_strategies_equal_one_worker_with_the_whole_batch(strategy: Strategy, world_size: int) -> None:
    outcomes = trained(strategy, world_size)
    model, optimizer = model_and_optimizer()
    for step in range(STEPS):
        parts = [batch(step, rank) for rank in range(world_size)]
        x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        assert len(x) == BATCH * world_size
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(outcomes[0].weights, model.parameters(), strict=True):
        assert (ours - theirs).norm() < 1e-12 * theirs.norm()


@every_repeatable
def test_state_survives_save_and_load(strategy: Strategy) -> None:
    """Half, save, start anew, load, second half: the same bits as when it saves and goes on."""

    def half_way(base: LocalLane, *, stops: bool) -> list[Any]:
        halves = [range(3), range(3, STEPS)]
        saved: dict[str, Any] = {}
        while halves:
            model, optimizer = model_and_optimizer()
            lane = base.lane(str(len(halves)))
            with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
                if saved:
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                    link.load_state_dict(saved["link"])
                for half in [halves.pop(0)] if stops else [halves.pop(0), halves.pop(0)]:
                    for step in half:
                        step_once(model, optimizer, step, link.rank)
                    saved = {
                        "model": {k: v.clone() for k, v in model.state_dict().items()},
                        "optimizer": deepcopy(optimizer.state_dict()),
                        "link": link.state_dict(),
                    }
        assert saved["link"]["steps"] == STEPS
        return list(saved["model"].values())

    goes_on, stopped = (run_threads(2, partial(half_way, stops=stops)) for stops in (False, True))
    for one, other in zip(goes_on, stopped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_foreign_state_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, tw.AllReduce()) as link:
        saved = {**link.state_dict(), "strategy": "Other()"}
        with pytest.raises(DataError, match=r"saved state is of Other\(\)"):
            link.load_state_dict(saved)


@every_strategy
def test_hooks_are_gone_after_detach(strategy: Strategy) -> None:
    model, optimizer = model_and_optimizer()
    link = tw.attach(model, optimizer, strategy)
    step_once(model, optimizer, 0, 0)
    link.detach()
    link.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    step_once(model, optimizer, 1, 0)
    assert link.stats.steps == 1


@every_strategy
def test_a_peer_lost_in_the_middle_raises_and_never_hangs(strategy: Strategy) -> None:
    world, errors = LocalWorld(3), []

    def survivor(lane: Lane) -> None:
        model, optimizer = model_and_optimizer()
        try:
            with tw.attach(model, optimizer, strategy, process_group=lane, timeout_s=500) as link:
                for step in range(1000):
                    if link.rank == 1 and step == 5:
                        raise RuntimeError("out of luck")
                    step_once(model, optimizer, step, link.rank)
        except (PeerLost, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=survivor, args=(world.lane(r),)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    lost = [error for error in errors if isinstance(error, PeerLost)]
    assert len(lost) == 2
    assert all("worker 1" in str(e) and "step 5" in str(e) and "out of luck" in str(e) for e in lost)


def test_silent_sends_nothing_even_with_buffers() -> None:
    def worker(lane: LocalLane) -> int:
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.Silent(), process_group=lane) as link:
            for step in range(3):
                model(batch(step, lane.rank)[0]).sum().backward()
                optimizer.step()
            return link.stats.sent_bytes

    assert run_threads(2, worker) == [0, 0]
