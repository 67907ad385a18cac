"""What each kind of strategy does when workers are lost and join, on the virtual clock.

The model counts: a sample's gradient is one at its own place, so what exact SGD has learned is how often it
has trained on each sample.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.simulate.worker import Learner
from thinwire.strategies.base import Strategy

NUM_SAMPLES = 96
EXACT: list[Strategy] = [tw.AllReduce(), tw.AllReduce(overlap="none"), tw.OkTopK(density=1.0)]
GOES_ON: list[Strategy] = [
    tw.GossipGraD(),
    tw.GossipGraD(share=0.3),
    tw.StochasticGradientPush(),
    tw.SASGD(interval=4),
    tw.DiLoCo(interval=4),
    tw.EASGD(interval=2),
    tw.Downpour(),
]
FAULTS = [
    ("kill:host=2,after=0.33",),
    ("kill:host=0,after=0.33",),
    ("kill:host=0,after=0.33", "kill:host=1,after=0.33"),
    ("kill:host=3,after=0.4", "rejoin:host=3,after=0.8"),
    ("kill:host=0,after=0.35", "kill:host=2,after=0.5", "rejoin:host=0,after=0.8", "rejoin:host=2,after=0.8"),
]


class Counting(Learner):
    """Its model has a number for each sample."""

    def __init__(self, host: int, group: CountingLearners) -> None:
        self.host, self._group = host, group
        self.model = nn.ParameterDict({"counts": nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.drawn: int | None = None

    @property
    def counts(self) -> Tensor:
        (counts,) = self.model.parameters()
        return counts

    def draw(self) -> bool:
        hand = self._group.hands[self.host]
        self._group.first_draw(self.host)
        if not hand:
            return False
        self.drawn = hand.pop(0)
        return True

    def learn(self) -> None:
        assert self.drawn is not None
        self.counts.grad = torch.zeros_like(self.counts)
        self.counts.grad[self.drawn] = -float(len(self._group.hosts))  # the mean over workers is one

    def stepped(self) -> None:
        assert self.drawn is not None
        self._group.trained.append(self.drawn)
        self.drawn = None


class CountingLearners:
    """All of them, and the samples that are left."""

    def __init__(self, size: int, *, agree: bool) -> None:
        self.agree = agree
        self.hosts: tuple[int, ...] = tuple(range(size))
        self.learners = [Counting(host, self) for host in self.hosts]
        self.trained: list[int] = []
        self.before: dict[int, Tensor] = {}
        """Models of those who stay, when the workers changed."""
        self.moved: dict[int, float] = {}
        """How far these were from that when training went on."""
        self._deal(list(range(NUM_SAMPLES)))

    def of(self, host: int) -> Counting:
        return self.learners[host]

    def _deal(self, samples: list[int]) -> None:
        size = len(self.hosts)
        even = len(samples) - len(samples) % size
        self.hands = {host: samples[rank:even:size] for rank, host in enumerate(self.hosts)}

    def change(self, hosts: tuple[int, ...], joined: Collection[int], furthest: int) -> None:
        left = [sample for hand in self.hands.values() for sample in hand]
        given_up = [each for each in self.learners if each.drawn is not None]
        left += [each.drawn for each in given_up if each.drawn is not None]
        for each in given_up:
            each.drawn = None
        ahead = self.learners[furthest].counts.detach().clone()
        for host in hosts:
            if self.agree or host in joined:
                with torch.no_grad():
                    self.learners[host].counts.copy_(ahead)
        self.before = {h: self.learners[h].counts.detach().clone() for h in hosts if h not in joined}
        self.hosts = hosts
        self._deal(sorted(left))

    def first_draw(self, host: int) -> None:
        if (before := self.before.pop(host, None)) is not None:
            self.moved[host] = float((self.learners[host].counts.detach() - before).abs().max())


def under(strategy: Strategy, faults: tuple[str, ...]) -> CountingLearners:
    learners = CountingLearners(4, agree=strategy.replicas_agree)
    description = describe(hosts=4, rate="100mbit", faults=faults, slow=["3=0.7"])
    model = ComputeModel.of(0.05)
    Session(Network(description, latency_s=0.001), strategy, learners, model, recovery_s=0.1).epoch()
    return learners


def ids(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else repr(value)


@pytest.mark.parametrize("faults", FAULTS, ids=ids)
@pytest.mark.parametrize("strategy", EXACT, ids=ids)
def test_exact_sgd_redoes_the_step_and_counts_each_sample_once(
    strategy: Strategy, faults: tuple[str, ...]
) -> None:
    learners = under(strategy, faults)
    models = [learners.of(host).counts for host in learners.hosts]
    assert all(torch.equal(model, models[0]) for model in models)
    seen = models[0].detach()
    left_over = NUM_SAMPLES - int((seen > 0.5).sum())
    assert left_over < 4 * len(faults), "at most the rests that do not go around"
    assert torch.allclose(seen[seen > 0.5], torch.ones((), dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize("faults", FAULTS[:3], ids=ids)
@pytest.mark.parametrize("strategy", GOES_ON, ids=ids)
def test_where_replicas_differ_whoever_is_left_goes_on_from_its_own_model(
    strategy: Strategy, faults: tuple[str, ...]
) -> None:
    learners = under(strategy, faults)
    assert set(learners.moved) == set(learners.hosts)
    assert set(learners.moved.values()) == {0.0}, "nothing that was learned is given up"


@pytest.mark.parametrize("faults", FAULTS, ids=ids)
@pytest.mark.parametrize("strategy", GOES_ON, ids=ids)
def test_no_sample_is_trained_on_twice_by_those_who_are_there(
    strategy: Strategy, faults: tuple[str, ...]
) -> None:
    learners = under(strategy, faults)
    assert len(set(learners.trained)) == len(learners.trained)
    assert len(learners.trained) > NUM_SAMPLES - 4 * len(faults) - 4
