"""Activation checkpointing, where forward runs again inside backward and gradients arrive in pieces."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, Scenario, alone, batch, in_threads, loss_of, seeded, sgd
from thinwire.strategies.base import Overlap

STEPS = 6


class Checkpointed(nn.Module):
    """Every layer but those outside is checkpointed, and the middle one is used twice."""

    def __init__(self, *, reentrant: bool, outside: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(6, 6) if outside else nn.Identity()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.into(x.requires_grad_())  # reentrant checkpoints want an input with a gradient
        for layer in (self.first, self.twice, self.twice, self.last):
            # Workers are threads here, and torch can deadlock when several save the global random state.
            h = checkpoint(layer, h, use_reentrant=self.reentrant, preserve_rng_state=False)
        return h


def checkpointing(
    place: Place, *, reentrant: bool, outside: bool, overlap: Overlap, weighted: bool
) -> Arrays:
    model = seeded(lambda: Checkpointed(reentrant=reentrant, outside=outside))
    optimizer = sgd(model)
    with place.attach(model, optimizer, strategy=tw.AllReduce(overlap=overlap)) as link:
        for step in range(STEPS):
            x, y = batch(step)
            sizes = [len(x) - place.world_size + 1] + [1] * (place.world_size - 1)
            x, y = x.split(sizes)[place.rank], y.split(sizes)[place.rank]
            if weighted:
                link.weight(len(x))
            else:
                x, y = place.part(step)
            optimizer.zero_grad()
            loss_of(model, (x, y)).backward()
            optimizer.step()
    return arrays(model)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
@pytest.mark.parametrize("outside", [True, False], ids=["some", "all"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-hooks"])
def test_equals_one_worker_with_the_whole_batch(
    reentrant: bool, outside: bool, overlap: Overlap, weighted: bool, world_size: int
) -> None:
    scenario = functools.partial(
        checkpointing, reentrant=reentrant, outside=outside, overlap=overlap, weighted=weighted
    )
    everyone = in_threads(world_size, scenario)

    assert difference(everyone[0], alone(scenario)) < 1e-11
    assert all(same_bits(weights, everyone[0]) for weights in everyone)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-hooks"])
def test_every_gradient_travels_once(reentrant: bool) -> None:
    """Nested backward passes are not mistaken for the end of the whole one."""

    def rounds_per_step(wire_place: Place) -> Arrays:
        model = seeded(lambda: Checkpointed(reentrant=reentrant, outside=False))
        optimizer = sgd(model)
        with wire_place.attach(model, optimizer, bucket_bytes=1 << 20) as link:
            assert isinstance(link, tw.Link)
            counted = []
            for step in range(STEPS):
                before = link.stats.rounds
                optimizer.zero_grad()
                loss_of(model, wire_place.part(step)).backward()
                optimizer.step()
                counted.append(link.stats.rounds - before)
        return {"rounds": torch.tensor(counted).numpy()}

    for counted in in_threads(2, rounds_per_step):
        assert counted["rounds"].tolist() == [1] * STEPS


CHECKPOINTINGS: dict[str, Scenario] = {
    f"{'reentrant' if reentrant else 'plain'} checkpoints": functools.partial(
        checkpointing, reentrant=reentrant, outside=True, overlap="backward", weighted=False
    )
    for reentrant in (True, False)
}
