"""Every feature again where it counts: spawned Gloo processes do what threads do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, once, same_bits
from tests.exact.place import Place, Scenario, alone, batch, in_threads, loss_of, net, sgd
from tests.exact.test_attachment import hooks, wider
from tests.exact.test_buffers import NORMS
from tests.exact.test_checkpointing import CHECKPOINTINGS
from tests.exact.test_join import joined, joined_by_hand
from tests.exact.test_loops import LOOPS, two_models
from tests.exact.test_precision import PRECISIONS
from tests.worlds import run_processes
from thinwire.errors import PeerDiffers, UsageError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SCENARIOS: dict[str, Scenario] = LOOPS | PRECISIONS | CHECKPOINTINGS | NORMS
LENGTHS = (5, 3, 4)


def run_all() -> dict[str, Arrays]:
    """One world for all scenarios: starting it takes longer than any of them."""
    return {name: scenario(Place("process")) for name, scenario in SCENARIOS.items()}


@once
def two_workers() -> list[dict[str, Arrays]]:
    return run_processes(2, run_all, timeout_s=500)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_have_the_bits_of_two_threads(name: str) -> None:
    threads = in_threads(2, SCENARIOS[name])
    for process, thread in zip(two_workers(), threads, strict=True):
        assert same_bits(process[name], thread)


def subset() -> Arrays:
    """Workers 0 and 2 train together, worker 1 by itself."""
    together = dist.new_group([0, 2])  # called by everyone, as torch wants it
    by_myself = dist.new_group([1])
    model = net(seed=dist.get_rank())
    optimizer = sgd(model)
    group = by_myself if dist.get_rank() == 1 else together
    with tw.attach(model, optimizer, tw.AllReduce(), process_group=group) as link:
        for step in range(3):
            x, y = (t.chunk(link.world_size)[link.rank] for t in batch(step))
            optimizer.zero_grad()
            loss_of(model, (x, y)).backward()
            optimizer.step()
    assert (link.stats.sent_bytes == 0) == (link.world_size == 1)
    return arrays(model)


def refusals() -> dict[str, str]:
    """What attach says to models that are wrapped, or that differ between workers."""
    said: dict[str, str] = {}
    wrapped: dict[str, Any] = {"ddp": DistributedDataParallel(net()), "fsdp": fully_shard(net())}
    for name, model in wrapped.items():
        with pytest.raises(UsageError) as caught:
            tw.attach(model, sgd(model), tw.AllReduce())
        said[name] = str(caught.value)
    model = wider() if dist.get_rank() == 1 else net()
    optimizer = sgd(model)
    with pytest.raises(PeerDiffers) as differs:
        tw.attach(model, optimizer, tw.AllReduce())
    assert hooks(model, optimizer) == []
    return said | {"different": str(differs.value)}


def run_three() -> dict[str, Any]:
    place = Place("process")
    return {
        "subset": subset(),
        "refusals": refusals(),
        "joined": joined(place, lengths=LENGTHS),  # and the world still works after refusing
        "two models": two_models(place),
    }


@once
def three_workers() -> list[dict[str, Any]]:
    return run_processes(3, run_three, timeout_s=500)


def test_some_workers_of_the_world_train_together() -> None:
    def plain(place: Place, seed: int) -> Arrays:
        model = net(seed)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            optimizer.step()
        return arrays(model)

    for worker, seed in zip(three_workers(), (0, 1, 0), strict=True):
        assert difference(worker["subset"], plain(Place("alone"), seed)) < 1e-11


def test_wrapped_models_are_refused() -> None:
    for worker in three_workers():
        assert "already wrapped in DistributedDataParallel" in worker["refusals"]["ddp"]
        assert "already wrapped in FSDP" in worker["refusals"]["fsdp"]


def test_another_model_is_named_on_all_workers() -> None:
    for worker in three_workers():
        assert "parameter 2.weight" in worker["refusals"]["different"]
        assert "rank 1" in worker["refusals"]["different"]


def test_workers_that_run_out_of_data_join_the_others() -> None:
    by_hand = joined_by_hand(LENGTHS)
    first = three_workers()[0]["joined"]
    assert difference({name: first[name] for name in by_hand}, by_hand) < 1e-11
    assert all(same_bits(worker["joined"], first) for worker in three_workers())


def test_two_models_of_three_workers() -> None:
    for worker in three_workers():
        assert difference(worker["two models"], alone(two_models)) < 1e-11
