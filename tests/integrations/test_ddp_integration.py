"""The hook inside DistributedDataParallel, in spawned Gloo processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.worlds import run_processes
from thinwire.errors import SettingError, UsageError
from thinwire.integrations.ddp import SETTLING_STEPS, HookState
from thinwire.strategies.base import Strategy
from thinwire.strategies.sparse.cost_probe import PROBES

STEPS = 8
GTOPK = tw.GTopK(density=0.05)


@dataclass
class Trained:
    weights: list[Tensor]
    gradients: list[list[Tensor]]
    """As the optimizer saw them, of every step."""
    saved: dict[str, Any]
    buckets: list[int]
    """Of every step."""


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)
    ).double()


def train(strategy: Strategy | None, steps: range, start: Any = None) -> Trained:
    """Train under DDP, with the hook if there is a strategy; `start` is what another training ended with."""
    rank = dist.get_rank()
    inner = model_of(seed=0)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state: HookState | None = None
    buckets: list[int] = []
    if strategy is not None:
        state, hook = tw.ddp_hook(strategy)
        if start is not None:
            inner.load_state_dict(start["model"])
            states = start["hooks"]
            alike = len(states) == dist.get_world_size()
            state.load_state_dict(states[rank]) if alike else state.resize(states)
        model.register_comm_hook(state, hook)
    gradients = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, 40, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        gradients.append([p.grad.clone() for p in inner.parameters() if p.grad is not None])
        optimizer.step()
        buckets += [] if state is None else [len(state._seen)]
    weights = [p.detach().clone() for p in inner.parameters()]
    saved: dict[str, Any] = {"model": inner.state_dict()}
    if state is not None:
        saved["hook"] = state.state_dict()
        state.close()
    return Trained(weights, gradients, saved, buckets)


def several() -> dict[str, Any]:
    """All of it in one world: processes take seconds to start."""
    found: dict[str, Any] = {
        "plain": train(None, range(STEPS)),
        "all-reduce": train(tw.AllReduce(), range(STEPS)),
        "gtopk": train(GTOPK, range(STEPS)),
        "first": train(GTOPK, range(4)),
    }
    hooks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hooks, found["first"].saved["hook"])
    start = {"model": found["first"].saved["model"], "hooks": hooks}
    found["second"] = train(GTOPK, range(4, 4 + SETTLING_STEPS), start)
    three = {**start, "hooks": [*hooks, hooks[0]]}
    found["fewer"] = train(GTOPK, range(4, 4 + SETTLING_STEPS + 1), three)
    early = train(GTOPK, range(4, 4 + SETTLING_STEPS), three).saved["hook"]
    found["fewer later"] = train(GTOPK, range(4, 4 + SETTLING_STEPS + 1), {**start, "hooks": [early] * 2})
    found["hooks"] = hooks
    return found


@pytest.mark.processes
def test_gradients_go_the_way_of_the_strategy() -> None:
    ranks = run_processes(2, several)
    for name in ("plain", "all-reduce", "gtopk"):
        pairs = zip(ranks[0][name].weights, ranks[1][name].weights, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
    found = ranks[0]
    # averaged once, whatever DDP does to its buckets meanwhile
    for ours, theirs in zip(found["all-reduce"].weights, found["plain"].weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for step in range(STEPS):
        large = [g for g in found["gtopk"].gradients[step] if g.dim() > 1]
        share = sum(int((g != 0).sum()) for g in large) / sum(g.numel() for g in large)
        if step < SETTLING_STEPS:
            assert share == 1
        else:  # in its steps 3 to 5 the largest bucket goes dense
            assert (share > 0.5) == (step - SETTLING_STEPS in PROBES), (step, share)
    buckets = found["gtopk"].buckets
    assert buckets[0] < buckets[1] == buckets[-1]  # DDP has arranged them anew
    _check_saved(ranks)


def _check_saved(ranks: list[dict[str, Any]]) -> None:
    hooks = ranks[0]["hooks"]
    before = _summed(hooks)
    assert bool(before.any())
    # not used up while DDP's buckets are unknown, and still there to be saved again
    torch.testing.assert_close(_summed([each["second"].saved["hook"] for each in ranks]), before)
    assert ranks[0]["second"].saved["hook"]["steps"] == hooks[0]["steps"] == 4 - SETTLING_STEPS
    # saved by three (of whom the third is the first once more), taken over by two, at once or after a stop
    for name in ("fewer", "fewer later"):
        assert [each[name].saved["hook"]["steps"] for each in ranks] == [4 - SETTLING_STEPS + 1] * 2
    for a, b in zip(ranks[0]["fewer"].weights, ranks[0]["fewer later"].weights, strict=True):
        assert torch.equal(a, b)


def _summed(hooks: list[dict[str, Any]]) -> Tensor:
    """The residuals of all ranks."""
    residuals = [hook["leaves"]["residual"].values() for hook in hooks]
    return torch.stack([torch.cat([part.flatten() for part in each]) for each in residuals]).sum(0)


@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.AllReduce(overlap="forward")], ids=repr)
def test_only_strategies_that_reduce_in_backward(strategy: Strategy) -> None:
    with pytest.raises(SettingError, match="strategy must be one that has gradients reduced"):
        tw.ddp_hook(strategy)


def test_without_a_process_group_there_is_nothing_to_hook_into() -> None:
    with pytest.raises(UsageError, match="ddp_hook needs a process group"):
        tw.ddp_hook(tw.GTopK())


@pytest.mark.parametrize("strategy", ["gtopk", tw.GTopK, None], ids=repr)
def test_only_strategy_objects(strategy: Any) -> None:
    with pytest.raises(SettingError, match="strategy must be a strategy object, got"):
        tw.ddp_hook(strategy)


def test_settings_that_a_hook_cannot_serve() -> None:
    with pytest.raises(SettingError, match=r"GTopK\.keep_rate must be False"):
        tw.ddp_hook(tw.GTopK(keep_rate=True))
    with pytest.raises(SettingError, match="timeout_s must be a positive number of seconds, got '5'"):
        tw.ddp_hook(tw.GTopK(), timeout_s="5")  # type: ignore[arg-type]


LAST_OWNER = """
import atexit, os, sys

def check():
    os._exit(0 if sys.getrefcount(pool.world) > owners else 3)

atexit.register(check)  # before thinwire is imported, so that it runs after thinwire's

import torch, torch.distributed as dist, thinwire as tw
from thinwire.wire.backend import pool
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
state, hook = tw.ddp_hook(tw.AllReduce())
model.register_comm_hook(state, hook)
model(torch.ones(1, 2)).sum().backward()
state.close()
dist.destroy_process_group()
owners = sys.getrefcount(pool.world)
"""


@pytest.mark.processes
def test_a_wrapper_is_never_the_last_owner_of_its_group() -> None:
    """It would join Gloo's threads while it holds the GIL, and now and then hang at exit (torch 2.13)."""
    subprocess.run([sys.executable, "-c", LAST_OWNER], check=True, timeout=500)


def wrapped_after_attach() -> str:
    model = model_of(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    link = tw.attach(model, optimizer, tw.AllReduce(), timeout_s=500)
    wrapped = DistributedDataParallel(model)
    loss = wrapped(torch.ones(2, 40, dtype=torch.float64)).sum()
    with pytest.raises(UsageError) as caught, link:
        loss.backward()
    return str(caught.value)


@pytest.mark.processes
def test_a_model_that_is_wrapped_after_attach_is_noticed() -> None:
    """By every worker itself, before it sends a gradient: none is still in DDP when another has ended."""
    for message in run_processes(2, wrapped_after_attach):
        assert "also wrapped in DistributedDataParallel" in message
        assert "ddp_hook" in message
