"""Momentum, clipping, warm-up, wrong settings, and what is said when it does not pay."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.strategies.sparse.world import World, random_gradients
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.strategies import registry
from thinwire.strategies.measured import costs
from thinwire.strategies.sparse.cost_probe import JUDGED, PROBES, CostProbe
from thinwire.wire.base import Lane

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SHAPE = [(300, 4)]


def test_momentum_is_corrected_and_masked() -> None:
    """Against DGC written down in a few lines."""
    strategy, size = tw.TopK(density=0.04, exact=True, momentum=0.9), 3
    world = World(strategy, size, SHAPE)
    speed = [torch.zeros(304, dtype=torch.float64) for _ in range(size)]
    kept = [torch.zeros(300, dtype=torch.float64) for _ in range(size)]
    for step in range(3):
        gradients = random_gradients(size, SHAPE, step)
        [applied] = world.step(gradients)[0]
        expected = torch.zeros(304, dtype=torch.float64)
        for rank in range(size):
            speed[rank] = 0.9 * speed[rank] + gradients[rank][0]
            kept[rank] += speed[rank][:300]
            sent = kept[rank].abs().topk(12).indices
            expected[sent] += kept[rank][sent]
            expected[300:] += speed[rank][300:]
            kept[rank][sent] = 0
            speed[rank][sent] = 0
        torch.testing.assert_close(applied, expected / size, rtol=1e-12, atol=1e-12)


def test_what_gtopk_completes_stops_on_every_worker() -> None:
    world = World(tw.GTopK(density=0.04, exact=True, momentum=0.9), 3, SHAPE)
    [applied] = world.step(random_gradients(3, SHAPE, seed=0))[0]
    kept = applied[:300].nonzero().view(-1)
    assert any(state.runtime.momentum.velocities[0][kept].any() for state in world.states)
    world.step([[torch.zeros(304, dtype=torch.float64)]] * 3)
    for state in world.states:
        assert not state.runtime.momentum.velocities[0][kept].any()
        assert not state.residuals[0][kept].any()
        assert state.runtime.momentum.velocities[0].any()


def test_momentum_of_a_world_of_one_is_that_of_sgd() -> None:
    def weights(strategy: tw.GTopK | tw.Silent, momentum: float) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        with tw.attach(model, optimizer, strategy):
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((2, 6), step + 1.0)).square().sum().backward()
                optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    torch.testing.assert_close(weights(tw.GTopK(momentum=0.9), 0.0), weights(tw.Silent(), 0.9))


@pytest.mark.parametrize("adam", [False, True])
def test_two_momenta_are_refused(adam: bool) -> None:
    model = nn.Linear(4, 2)
    own = list(model.parameters())
    optimizer = torch.optim.Adam(own) if adam else torch.optim.SGD(own, lr=0.1, momentum=0.9)
    with pytest.raises(SettingError, match=r"GTopK\.momentum must be 0 with an optimizer that has momentum"):
        tw.attach(model, optimizer, tw.GTopK(momentum=0.9))


def test_gradients_are_clipped_before_they_are_selected() -> None:
    gradients = random_gradients(4, [(300, 4), (50, 0)], seed=1)
    clipped = []
    for own in gradients:
        norm = math.sqrt(sum(float(each.square().sum()) for each in own))
        clipped.append([each * min(1.0, 2.0 * 2 / norm) for each in own])
    ours = World(tw.GTopK(clip_norm=2.0), 4, [(300, 4), (50, 0)]).step(gradients)
    theirs = World(tw.GTopK(), 4, [(300, 4), (50, 0)]).step(clipped)
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b)
    huge = World(tw.GTopK(clip_norm=1e9), 4, [(300, 4), (50, 0)]).step(gradients)
    plain = World(tw.GTopK(), 4, [(300, 4), (50, 0)]).step(gradients)
    assert all(torch.equal(a, b) for a, b in zip(huge[0], plain[0], strict=True))


def test_what_was_clipped_so_is_not_clipped_again() -> None:
    def work(lane: Lane) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Linear(40, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.TopK(density=0.1, clip_norm=1.0), process_group=lane) as link:
            model(torch.ones(2, 40)).square().sum().backward()
            found = link.clip_grad_norm_(1e-6)
            return float(found), float(
                torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            )

    for found, left in run_threads(2, work):
        assert found == pytest.approx(left)
        assert left > 1e-3


def test_the_rate_that_is_kept_is_the_optimizers() -> None:
    def work(lane: Lane) -> list[list[float]]:
        model = nn.Linear(40, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with tw.attach(model, optimizer, tw.TopK(keep_rate=True), process_group=lane) as link:
            for rate in (0.1, 0.05, 0.02):
                optimizer.load_state_dict(optimizer.state_dict())  # replaces its groups
                optimizer.param_groups[0]["lr"] = rate
                model(torch.ones(2, 40)).square().sum().backward()
                optimizer.step()
                seen.append(link.state_dict()["plain"][0]["rates"])
        return seen

    assert run_threads(2, work) == [[[0.1], [0.05], [0.02]]] * 2


def test_a_rate_that_nobody_knows_cannot_be_kept() -> None:
    with pytest.raises(SettingError, match=r"TopK\.keep_rate must be False where the optimizer is not known"):
        World(tw.TopK(keep_rate=True), 2, SHAPE, rate=None)


def test_a_dense_step_applies_everything_that_was_kept() -> None:
    world = World(tw.TopK(), 2, SHAPE)
    for step in range(PROBES[0] + 1):
        world.step(random_gradients(2, SHAPE, step))
        assert bool(world.residual(0).any()) == (step not in PROBES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, r"TopK\.density must be above 0 and at most 1, got 0\.0"),
        ({"density": 1.5}, r"TopK\.density must be above 0"),
        ({"payload": "fp8"}, r"TopK\.payload must be one of 'fp32', 'bf16', got 'fp8'"),
        ({"warmup_steps": -1}, r"TopK\.warmup_steps must be 0 or more steps, got -1"),
        ({"momentum": 1.0}, r"TopK\.momentum must be 0 or more and below 1, got 1\.0"),
        ({"clip_norm": 0.0}, r"TopK\.clip_norm must be None or a positive number, got 0\.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    for strategy in (tw.TopK, tw.GTopK, tw.OkTopK):
        with pytest.raises(SettingError, match=message):
            strategy(**settings)  # type: ignore[arg-type]


def test_too_few_steps_for_a_density_are_told() -> None:
    strategy = tw.GTopK(density=0.001)
    assert strategy.advice(8000, 4) == ""
    assert strategy.advice(5880, 4) == (
        "GTopK with density=0.001 changes a parameter 5.9 times in 5,880 steps; fewer than about 8 with 4 "
        "workers may cost more than a point of accuracy: set density=0.0014 or more, or train longer; "
        "see docs/gtopk.md, 'What it costs in accuracy'"
    )
    assert strategy.advice(20, 4).partition("accuracy: ")[2].startswith("send everything (all-reduce)")
    assert "fewer than about 24 with 16 workers" in strategy.advice(12_000, 16)
    assert tw.AllReduce().advice(1, 4) == ""


def test_where_nobody_knows_the_steps_it_says_how_many_are_needed() -> None:
    said = tw.GTopK(density=0.001).advice(None, 16)
    assert said.startswith(
        "GTopK with density=0.001 changes a parameter 24 times in 24,000 steps; fewer than"
    )
    assert "give attach num_steps" in said
    assert tw.TopK(density=0.5).advice(None, 16) == ""


def test_the_advice_is_true_to_what_was_measured() -> None:
    """cifar-resnet20 with 16 workers lost more than two points with a density of 0.001, and less with the one
    that the advice names: a training that was cut off in its last epoch shows that."""
    measured = costs("gtopk", 16, density=0.001, complete=True)
    assert measured is not None
    assert (measured.workers, measured.recipe) == (16, "cifar-resnet20")
    assert measured.loss > 2
    runs = json.loads((RESULTS / "map-cifar-resnet20.json").read_text())["runs"]
    exact = [run for run in runs if (run["strategy"], run["workers"]) == ("all-reduce", 16)]
    steps = exact[0]["steps"][-1]
    said = tw.GTopK(density=0.001).advice(steps, 16)
    named = float(said.partition("set density=")[2].partition(" ")[0])
    assert tw.GTopK(density=named).advice(steps, 16) == ""
    [cut_off, *_] = json.loads((RESULTS / "unfinished-20261118-213700.json").read_text())["runs"]
    trained = registry.from_text(cut_off["strategy"])
    assert isinstance(trained, tw.GTopK)
    assert named == pytest.approx(trained.density, rel=0.05)
    assert mean(run["value"] for run in exact) - cut_off["by_epoch"]["29"] < 0.02


def judged(sparse_s: float, probe_s: float) -> CostProbe:
    probe = CostProbe(dense_bytes=1000)
    now_s = 0.0
    for step in range(JUDGED + 3):
        probe.next_step(step, "TopK", tell=True)
        for _ in range(2):  # two buckets, one beginning before the other has ended
            probe.begin(now_s)
            probe.begin(now_s + 0.1 * sparse_s)
            probe.end(now_s + 0.3 * sparse_s)
            probe.end(now_s + 0.5 * sparse_s)
            now_s += sparse_s
        if step in PROBES:
            probe.probed(100, probe_s)
    return probe


def test_says_once_if_it_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        probe = judged(sparse_s=0.5, probe_s=0.04)
        assert probe.sparse_s == pytest.approx(0.5)
        assert probe.dense_s == pytest.approx(0.4)
        [said] = caplog.messages
        assert said == (
            "TopK does not pay here: selecting and sending takes 0.5 s of every step, "
            "sending everything with AllReduce() about 0.4 s: use AllReduce() here (--strategy all-reduce); "
            "see docs/topk.md, 'Does it pay?'"
        )
        caplog.clear()
        judged(sparse_s=0.5, probe_s=0.06)
        assert not caplog.messages


def test_tells_of_itself() -> None:
    strategy = tw.TopK(density=0.04)
    world = World(strategy, 2, SHAPE)
    for step in range(JUDGED + 2):
        world.step(random_gradients(2, SHAPE, step))
    told = strategy.instruments(world.states[0])
    assert 0 < told["density"] <= 0.04
    assert 0 <= told["left_share"] < 1
    assert told["sparse_s"] > 0
    assert told["dense_s"] > 0
