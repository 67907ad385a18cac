"""Split layers under clipping, mixed precision, accumulation, strategies and checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.parallel.nets import BATCH, CASES, OPTIMIZERS, train
from tests.worlds import run_processes

CNN = CASES["cnn"]
WORKERS, STEPS, CLIP = 4, 6, 0.05
STRATEGIES = {
    "gtopk": tw.GTopK(density=0.2),
    "gossip": tw.GossipGraD(),
    "sasgd": tw.SASGD(interval=2),
}


def rows() -> slice:
    share = BATCH // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def split(groups: int) -> nn.Module:
    model = CNN.model()
    tw.parallel.hybridize(model, groups=groups, layers=CNN.layers)
    return model


def clipped(groups: int, sharded: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Each step: two backward passes, clipped."""
    model, norms = split(groups), []
    optimizer = OPTIMIZERS["adamw"](model)
    with tw.attach(model, optimizer, tw.AllReduce(), sharded=sharded) as link:
        for number in range(STEPS):
            x, y = CNN.batch(number)
            optimizer.zero_grad()
            with link.no_sync():
                nn.functional.cross_entropy(model(x[rows()]), y[rows()]).backward()
            nn.functional.cross_entropy(model(2 * x[rows()]), y[rows()]).backward()
            norms.append(float(link.clip_grad_norm_(CLIP)))
            optimizer.step()
    return tw.parallel.full_state_dict(model), norms


def clipped_alone() -> tuple[dict[str, Tensor], list[float]]:
    model, norms = CNN.model(), []
    optimizer = OPTIMIZERS["adamw"](model)
    for number in range(STEPS):
        x, y = CNN.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.functional.cross_entropy(model(2 * x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return model.state_dict(), norms


def clipped_without(left_out: int) -> dict[str, Tensor]:
    """One process in float32, without one step."""
    model = CNN.model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        x, y = CNN.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.float()), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if number != left_out:
            optimizer.step()
    return model.state_dict()


def under(strategy: tw.Strategy) -> tuple[dict[str, Tensor], float]:
    """The model, and the training loss of the whole batch after it."""
    model = split(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tw.attach(model, optimizer, strategy):
        for _ in range(20):
            train(model, optimizer, CNN, range(1), rows())
    x, y = CNN.batch(0)
    return tw.parallel.full_state_dict(model), float(nn.functional.cross_entropy(model(x), y).detach())


def scaled(sharded: bool, overflow_at: int) -> tuple[dict[str, Tensor], list[float]]:
    """With a GradScaler, and an overflow that only one worker's strip has; and its scales."""
    model, scales, number = split(2).float(), list[float](), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = tw.parallel.GradScaler("cpu", init_scale=2.0**4)

    def overflow(gradient: Tensor) -> Tensor:
        if number != overflow_at or dist.get_rank() != 1:
            return gradient
        wrong = gradient.clone()
        assert isinstance(wrong, DTensor)
        wrong.to_local().fill_(math.inf)
        return wrong

    model.get_parameter("classifier.0.weight").register_hook(overflow)
    with tw.attach(model, optimizer, tw.AllReduce(), sharded=sharded) as link:
        for number in range(STEPS):
            x, y = CNN.batch(number)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x.float()[rows()]), y[rows()])).backward()
            scaler.unscale_(optimizer)
            link.clip_grad_norm_(CLIP)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return tw.parallel.full_state_dict(model), scales


def in_bfloat16() -> float:
    """Autocast: how far the split model's gradient is from that of the plain one."""
    model, plain = split(2).float(), CNN.model().float()
    x, y = CNN.batch(0)
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(each(x.float()), y)
        loss.backward()
    gradient, other = (
        model.get_parameter("classifier.2.weight").grad,
        plain.get_parameter("classifier.2.weight").grad,
    )
    assert isinstance(gradient, DTensor)
    assert other is not None
    return float((gradient.full_tensor() - other).norm() / other.norm())


def resumed(folder: Path, groups: int, sharded: bool, until: int) -> dict[str, Tensor]:
    model = split(groups)
    optimizer = OPTIMIZERS["adamw"](model)
    with (
        tw.attach(model, optimizer, tw.AllReduce(), sharded=sharded) as link,
        tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
    ):
        found = checkpoint.load()
        train(model, optimizer, CNN, range(found.step if found else 0, until), rows())
        checkpoint.save(until)
    return tw.parallel.full_state_dict(model)


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"norms of groups": [], "strategies": {}}
    for groups, sharded in ((1, False), (2, True)):
        state, norms = clipped(groups, sharded)
        found["norms of groups"].append(norms)
        found[f"clipped {groups}"] = state
    for name, strategy in STRATEGIES.items():
        found["strategies"][name] = under(strategy)
    found["bfloat16"] = in_bfloat16()
    found["scaled"] = [scaled(sharded, 2) for sharded in (False, True)]
    model = split(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.attach(model, optimizer, tw.GossipGraD()) as link:
        told = r"cannot hold classifier.0.weight, which is split, under GossipGraD.* whose replicas differ"
        with pytest.raises(tw.errors.UsageError, match=told):
            tw.Checkpoint(folder / "gossip", link=link, model=model, optimizer=optimizer)
    resumed(folder, 2, False, 2)
    resumed(folder, 1, True, 4)
    return found


@pytest.mark.processes
def test_what_split_layers_compose_with(tmp_path: Path) -> None:
    results = run_processes(WORKERS, everything, tmp_path)
    reference, norms = clipped_alone()
    x, y = CNN.batch(0)
    left_out = clipped_without(2)
    before = float(nn.functional.cross_entropy(CNN.model()(x), y).detach())
    for found in results:
        for groups in (1, 2):
            for name, value in reference.items():
                assert (found[f"clipped {groups}"][name] - value).norm() < 1e-9 * value.norm()
        for theirs in found["norms of groups"]:
            assert theirs == pytest.approx(norms, rel=1e-9)
        for name, (model, loss) in found["strategies"].items():
            assert loss < 0.9 * before, name
            for key, value in results[0]["strategies"][name][0].items():
                assert torch.allclose(model[key], value), name
        assert found["bfloat16"] < 0.02
        for state, scales in found["scaled"]:
            assert scales == [2.0**4] * 2 + [2.0**3] * (STEPS - 2)  # left out once, by all workers
            for name, value in left_out.items():
                assert (state[name] - value).norm() < 1e-4 * value.norm(), name
    # two workers go on where four were, with another number of groups
    models = run_processes(2, resumed, tmp_path, 1, False, STEPS)
    whole = CNN.model()
    train(whole, OPTIMIZERS["adamw"](whole), CNN, range(STEPS))
    for model in (*models, tw.Checkpoint.read_model(tmp_path)):
        for name, value in whole.state_dict().items():
            assert (model[name] - value).norm() < 1e-9 * value.norm(), name
