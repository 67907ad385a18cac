"""AutoStrategy picks by the wire, changes its mind, and loses nothing when it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.hosts.description import describe
from thinwire.planner.auto import OPTIONS, AutoState
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_times
from thinwire.strategies import registry
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane

SHAPES = [(500, 500)] * 8
WORLD = 4


def timed(strategy: Strategy, rate: str) -> float:
    network = Network(describe(hosts=WORLD, rate=rate), latency_s=1e-4)
    return step_times(SHAPES, network, strategy, ComputeModel.of(0.1), steps=50).step_s


@pytest.mark.parametrize(("rate", "best"), [("20mbit", "gossip-grad:share=0.1"), ("10gbit", "all-reduce")])
def test_it_is_as_fast_as_the_best_within_the_budget(rate: str, best: str) -> None:
    found = timed(tw.AutoStrategy(accuracy_budget=0.5), rate)
    assert found == pytest.approx(timed(registry.from_text(best), rate), rel=0.05)


def test_without_a_budget_it_stays_exact() -> None:
    assert timed(tw.AutoStrategy(accuracy_budget=0), "100mbit") > 0.9 * timed(tw.AllReduce(), "100mbit")


class Picks(tw.AutoStrategy):
    """Picks what a test says, whatever the wire is like."""

    def _choose(self, state: AutoState, wire: tw.Wire, worst: Sequence[float]) -> int:
        return int(_order.pop(0) if wire.rank == 0 else 0)  # the first worker's pick counts


_order: list[int] = []


def train(lane: Lane, strategy: Strategy, steps: int) -> tuple[Tensor, int]:
    """Constant gradients, another on every worker: where all end is known."""
    model = nn.Linear(64, 32, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    pull = torch.randn(32, 64, generator=torch.Generator().manual_seed(lane.rank), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tw.attach(model, optimizer, strategy, process_group=lane) as link:
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight * pull).sum().backward()
            optimizer.step()
        switches = int(link.stats.instruments["switches"])
        return model.weight.detach().clone(), switches


@pytest.mark.parametrize("option", range(1, len(OPTIONS)), ids=OPTIONS[1:])
def test_nothing_is_lost_on_a_switch(option: int) -> None:
    """Exact, then the option, then exact again: all workers have applied every gradient of all of them."""
    strategy, steps = Picks(measure_steps=4, reconsider_every=4), 14
    _order[:] = [option, 0, 0]  # after steps 4, 8 and 12
    results = run_threads(WORLD, lambda lane: train(lane, strategy, steps))
    pulls = [
        torch.randn(32, 64, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(WORLD)
    ]
    expected = -steps * torch.stack(pulls).mean(0)
    for weight, switches in results:
        assert switches == 2
        assert torch.allclose(weight, expected, rtol=1e-9, atol=1e-9)


def test_residuals_of_one_are_not_those_of_another() -> None:
    """From top-k to trickle and back, over steps in which both keep a lot to themselves."""
    strategy, steps = Picks(measure_steps=4, reconsider_every=4), 22
    trickle, gtopk = (OPTIONS.index(text) for text in ("trickle", "gtopk"))
    _order[:] = [gtopk, trickle, gtopk, 0, 0]
    results = run_threads(WORLD, lambda lane: train(lane, strategy, steps))
    pulls = [
        torch.randn(32, 64, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(WORLD)
    ]
    for weight, _ in results:
        assert torch.allclose(weight, -steps * torch.stack(pulls).mean(0), rtol=1e-9, atol=1e-9)


def state_with(**values: Any) -> AutoState:
    state = AutoState([None] * len(OPTIONS))
    for name, value in values.items():
        setattr(state, name, value)
    return state


def test_a_pick_that_was_wrong_is_taken_back() -> None:
    strategy, steps_s = tw.AutoStrategy(), [1.0, *[0.0] * (len(OPTIONS) - 1)]
    state = state_with(pick=2, before=0, steps_s=steps_s, bit_per_s=1e8)
    pick = strategy._choose(state, None, [0.1, 0.0, 1.5, 1e-4, 1e-8])  # type: ignore[arg-type]  # no wire is used
    assert pick == 0
    assert state.banned[2]


def test_another_bandwidth_gives_every_option_a_new_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fastest(self: object, state: AutoState, *_: object) -> int:
        seen.append(list(state.banned))
        return 2

    monkeypatch.setattr(tw.AutoStrategy, "_fastest", fastest)

    class OnlySize:
        world_size = 4

    state = state_with(pick=0, banned=[False, False, True, False, False], bit_per_s=1e9)
    wire: Any = OnlySize()
    assert tw.AutoStrategy()._choose(state, wire, [0.1, 0.0, 0.5, 1e-4, 1 / 9e8]) == 2
    assert tw.AutoStrategy()._choose(state, wire, [0.1, 0.0, 0.5, 1e-4, 1 / 1e8]) == 2
    assert seen == [[False, False, True, False, False], [False] * 5]


@pytest.mark.parametrize(("measured_s", "pick"), [(0.112, 0), (0.13, 1)])
def test_what_is_used_is_judged_by_the_clock(measured_s: float, pick: int) -> None:
    """Exact SGD stays where both hide what they send, unless its own steps say something else."""
    strategy = tw.AutoStrategy(accuracy_budget=0.5)
    with_buckets: list[AutoState] = []

    class Seen(tw.AutoStrategy):
        def init(self, buckets: Sequence[Any], wire: tw.Wire) -> AutoState:
            with_buckets.append(super().init(buckets, wire))
            return with_buckets[-1]

    step_times(
        SHAPES, Network(describe(hosts=WORLD, rate="10gbit")), Seen(measure_steps=99), ComputeModel.of(0.1)
    )

    class OnlySize:
        world_size = WORLD

    wire: Any = OnlySize()
    assert strategy._choose(with_buckets[0], wire, [0.1, 0.01, measured_s, 1e-4, 1e-10]) == pick


@pytest.mark.parametrize("field", ["accuracy_budget", "measure_steps", "reconsider_every"])
def test_settings_are_checked(field: str) -> None:
    settings: dict[str, Any] = {field: -1}
    with pytest.raises(SettingError, match=f"AutoStrategy.{field} must be"):
        tw.AutoStrategy(**settings)
