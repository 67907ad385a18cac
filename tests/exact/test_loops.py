"""Ways to write a training loop: each gives what one worker with the whole batch gets."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, Scenario, alone, batch, in_threads, loss_of, net, seeded, sgd
from thinwire.strategies.base import Overlap

STEPS = 8


def parameter_groups(place: Place) -> Arrays:
    """Two groups with settings of their own, a scheduler, and a layer that is frozen."""
    model = net(seed=place.rank)
    frozen, first, last = model[0], model[2], model[4]  # type: ignore[index]  # nn.Sequential
    frozen.requires_grad_(False)
    groups = [
        {"params": [*first.parameters()], "lr": 0.02},
        {"params": [*last.parameters()], "weight_decay": 0.1},
    ]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            optimizer.step()
            scheduler.step()
    assert frozen.weight.grad is None
    return arrays(model)


def accumulation(place: Place, *, quietly: bool) -> Arrays:
    """Three backward passes per step; `quietly`: only the last one communicates."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer) as link:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                loss = loss_of(model, place.part(3 * step + part)) / 3
                if quietly and part < 2:
                    with link.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
    return arrays(model)


def clipping(place: Place) -> Arrays:
    """Plain clip_grad_norm_ sees the reduced gradients."""
    model = net()
    optimizer, norms = sgd(model), []
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
    return arrays(model) | {"norms": torch.stack(norms).numpy()}


def gradients_kept(place: Place) -> Arrays:
    """Gradients are zeroed in place instead of dropped."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, place.part(step)).backward()
            optimizer.step()
    return arrays(model)


def closure(place: Place) -> Arrays:
    """LBFGS calls backward many times within one step."""
    model = net()
    # It may stop on the loss, which is each worker's own; on the gradient, which is everyone's, it agrees.
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=5, tolerance_change=0)
    with place.attach(model, optimizer):
        for step in range(3):

            def evaluate(step: int = step) -> float:
                optimizer.zero_grad()
                loss = loss_of(model, place.part(step))
                loss.backward()
                return loss.item()

            optimizer.step(evaluate)
    return arrays(model)


def gradient_penalty(place: Place) -> Arrays:
    """autograd.grad inside the loss is not a backward pass of the model."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            x, y = place.part(step)
            x.requires_grad_()
            optimizer.zero_grad()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            ((output - y).square() + slope.square()).mean().backward()
            optimizer.step()
    return arrays(model)


def unequal_batches(place: Place) -> Arrays:
    """The first worker has most of every batch, the last but one sample."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer) as link:
        for step in range(STEPS):
            x, y = batch(step)
            cut = [0, *range(len(x) - place.world_size + 1, len(x) + 1)]
            mine = slice(cut[place.rank], cut[place.rank + 1])
            optimizer.zero_grad()
            link.weight(len(x[mine]))
            loss_of(model, (x[mine], y[mine])).backward()
            optimizer.step()
    return arrays(model)


def two_models(place: Place, *, frozen: bool = False) -> Arrays:
    """A generator and a critic, attached at the same time.

    While the generator learns, the critic only passes gradients on: it is `frozen`, or it does not sync.
    """
    generator = seeded(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), seed=1 + place.rank
    )
    critic = net(seed=place.rank)
    ours, theirs = Adam(generator.parameters(), lr=0.01), sgd(critic)
    with (
        place.attach(generator, ours, lane="generator"),
        place.attach(critic, theirs, lane="critic") as critic_link,
    ):
        for step in range(STEPS):
            x, _ = place.part(step)
            drawn = generator(x)
            theirs.zero_grad()
            (critic(drawn.detach()).sigmoid() - critic(x).sigmoid()).mean().backward()
            theirs.step()
            ours.zero_grad()
            critic.requires_grad_(not frozen)
            with contextlib.nullcontext() if frozen else critic_link.no_sync():
                (-critic(drawn).sigmoid()).mean().backward()
            critic.requires_grad_(True)
            ours.step()
    named = {"generator": arrays(generator), "critic": arrays(critic)}
    return {f"{model}.{name}": a for model, each in named.items() for name, a in each.items()}


LOOPS: dict[str, Scenario] = {
    "parameter groups": parameter_groups,
    "accumulation": functools.partial(accumulation, quietly=True),
    "accumulation that communicates every time": functools.partial(accumulation, quietly=False),
    "clipping": clipping,
    "gradients kept": gradients_kept,
    "closure": closure,
    "gradient penalty": gradient_penalty,
    "unequal batches": unequal_batches,
    "two models": two_models,
    "two models, one frozen by turns": functools.partial(two_models, frozen=True),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_equals_one_worker_with_the_whole_batch(name: str, world_size: int) -> None:
    whole, everyone = alone(LOOPS[name]), in_threads(world_size, LOOPS[name])

    assert difference(everyone[0], whole) < 1e-11
    assert all(same_bits(weights, everyone[0]) for weights in everyone)


@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
def test_a_weight_given_by_one_worker_counts_for_all(overlap: Overlap) -> None:
    """The others count 1: replicas agree, and a weight holds for one backward."""

    def weighted(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer) as link:
            for step in range(STEPS):
                optimizer.zero_grad()
                if place.rank == 1 and step % 2:
                    link.weight(0.25)
                loss_of(model, place.part(step)).backward()
                optimizer.step()
        return arrays(model)

    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        share = 0.25 if step % 2 else 1.0
        first, second = zip(*(t.chunk(2) for t in batch(step)), strict=True)
        ((loss_of(model, first) + share * loss_of(model, second)) / (1 + share)).backward()
        optimizer.step()

    everyone = in_threads(2, weighted, overlap)
    assert difference(everyone[0], arrays(model)) < 1e-12
    assert same_bits(*everyone)


def test_no_sync_sends_nothing() -> None:
    def sent(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer) as link:
            before = link.stats  # type: ignore[union-attr]  # never alone
            with link.no_sync():
                loss_of(model, place.part(0)).backward()
            after = link.stats  # type: ignore[union-attr]
        return {"bytes": np.array(after.sent_bytes - before.sent_bytes), "grad": model[0].weight.grad.numpy()}  # type: ignore[index]

    first, second = in_threads(2, sent)
    assert first["bytes"] == second["bytes"] == 0
    assert not np.array_equal(first["grad"], second["grad"])
