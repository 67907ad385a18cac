"""Workers that run out of data early go on with the others until all have."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, average_gradients_, in_threads, loss_of, net, seeded, sgd
from thinwire.engine.buffers import BufferPolicy
from thinwire.strategies.base import Overlap

EPOCHS = 2


def sample(epoch: int, rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * epoch + 100 * rank + index)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def joined(
    place: Place, *, lengths: Sequence[int], overlap: Overlap = "backward", adam: bool = False
) -> Arrays:
    """Worker i has `lengths[i]` batches in every epoch."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01) if adam else sgd(model)
    with place.attach(model, optimizer, strategy=tw.AllReduce(overlap=overlap)) as link:
        for epoch in range(EPOCHS):
            with link.join():
                for index in range(lengths[place.rank]):
                    optimizer.zero_grad()
                    loss_of(model, sample(epoch, place.rank, index)).backward()
                    optimizer.step()
        assert isinstance(link, tw.Link)
        assert link.stats.steps == EPOCHS * max(lengths)
    state = optimizer.state_dict()["state"]
    memory = {f"{i}.{key}": torch.as_tensor(s[key]).double().numpy() for i, s in state.items() for key in s}
    return arrays(model) | memory


def joined_by_hand(lengths: Sequence[int]) -> Arrays:
    """One process; each step's gradient is the mean over the workers that still have data."""
    model = net()
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        for index in range(max(lengths)):
            active = [rank for rank in range(len(lengths)) if index < lengths[rank]]
            optimizer.zero_grad()
            for rank in active:
                (loss_of(model, sample(epoch, rank, index)) / len(active)).backward()
            optimizer.step()
    return arrays(model)


@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 2, 6), (0, 3, 2), (4, 4, 4), (2, 7)], ids=str)
def test_the_mean_is_over_those_who_still_have_data(lengths: tuple[int, ...], overlap: Overlap) -> None:
    everyone = in_threads(len(lengths), functools.partial(joined, lengths=lengths, overlap=overlap))

    by_hand = joined_by_hand(lengths)
    assert difference({name: everyone[0][name] for name in by_hand}, by_hand) < 1e-12
    assert all(same_bits(worker, everyone[0]) for worker in everyone)


def test_every_optimizer_ends_with_the_last_ones_memory() -> None:
    everyone = in_threads(3, functools.partial(joined, lengths=(5, 3, 4), adam=True))

    assert float(everyone[1]["0.step"]) == EPOCHS * 5
    assert all(same_bits(worker, everyone[0]) for worker in everyone)


def normed() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def normed_by_hand(policy: BufferPolicy, lengths: Sequence[int]) -> Arrays:
    """Replicas in one process; the buffers of those that still have data count."""
    replicas = [normed() for _ in lengths]
    optimizers = [sgd(model) for model in replicas]
    for index in range(max(lengths)):
        active = [rank for rank in range(len(lengths)) if index < lengths[rank]]
        for rank in active:
            optimizers[rank].zero_grad()
            loss_of(replicas[rank], sample(0, rank, index)).backward()
        average_gradients_([replicas[rank] for rank in active])
        for rank in active:
            optimizers[rank].step()
        for buffers in zip(*(replicas[rank].buffers() for rank in active), strict=True):
            mean = sum(b.double() for b in buffers) / len(active)
            for buffer in buffers:
                buffer.copy_(mean if policy == "average" else buffers[0])
    return arrays(replicas[max(range(len(lengths)), key=lambda rank: lengths[rank])])


@pytest.mark.parametrize("policy", ["rank0", "average"])
def test_batch_norm_statistics_are_those_of_workers_with_data(policy: BufferPolicy) -> None:
    """Rank 0, whose statistics usually count, runs out first."""
    lengths = (2, 6, 4)

    def train(place: Place) -> Arrays:
        model = normed()
        optimizer = sgd(model)
        with place.attach(model, optimizer, buffers=policy) as link, link.join():
            for index in range(lengths[place.rank]):
                optimizer.zero_grad()
                loss_of(model, sample(0, place.rank, index)).backward()
                optimizer.step()
        return arrays(model)

    everyone = in_threads(3, train)
    assert difference(everyone[0], normed_by_hand(policy, lengths)) < 1e-12
    assert all(same_bits(weights, everyone[0]) for weights in everyone)
