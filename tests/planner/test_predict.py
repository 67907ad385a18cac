"""Predictions are what the clock plays; one worker stands for all of its kind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.hosts.description import describe
from thinwire.planner.beside import Beside
from thinwire.planner.cluster import Cluster, ClusterHost, stated
from thinwire.planner.plan import make_plan
from thinwire.planner.predict import CANDIDATES, CEILING, Planner, parts, settled
from thinwire.planner.recommend import LEAST_TIMES, PRECISION, _least_hidden, balance, best_of, recommend
from thinwire.planner.workload import Workload
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import StepTimes, step_times
from thinwire.strategies import registry
from thinwire.strategies.base import Strategy, overrides

WORK = Workload.of_sizes(2e6, 12, 0.2)


def cluster(rate: str = "200mbit") -> Cluster:
    return stated(describe(hosts=1, rate=rate), latency_s=4e-4)


@pytest.mark.parametrize("workers", [4, 7, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", CANDIDATES)
def test_one_representative_is_as_good_as_all(
    text: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = registry.from_text(text)
    if overrides(strategy, "serve"):
        pytest.skip("these are played one by one in any case")
    planner = Planner(Workload.of_sizes(2e5, 6, 0.2), cluster())

    def play() -> StepTimes:
        return planner.play(strategy, workers)

    alike = play()
    monkeypatch.setattr("thinwire.simulate.sizes.replace", lambda model, **_: model)
    assert asdict(alike) == pytest.approx(asdict(play()), rel=1e-6)


def test_kinds_of_many_workers_wait_for_the_slowest() -> None:
    slow = ClusterHost(name="slow", rate_bit_per_s=1e8, speed=0.5)
    fast = ClusterHost(name="fast", rate_bit_per_s=1e8)
    hosts = Cluster(hosts=(*[fast] * 7, slow), latency_s=1e-4)
    few, many = (Planner(WORK, hosts).play(registry.from_text("gossip-grad:share=0.1"), n) for n in (64, 128))
    assert few.step_s == pytest.approx(0.4, rel=0.02)  # one by one
    assert many.step_s == pytest.approx(few.step_s, rel=0.02)  # one of each kind


def test_ten_thousand_workers_can_be_played() -> None:
    made = make_plan(WORK, cluster(), [10_000])
    assert {p.strategy for p in made.predictions} == {CEILING, *CANDIDATES}


def test_selecting_and_copying_take_their_time() -> None:
    plain = cluster("1gbit")
    slow = Cluster(
        hosts=plain.hosts, latency_s=plain.latency_s, copy_bytes_per_s=1e9, select_numbers_per_s=5e6
    )
    times = {
        (text, hosts): Planner(WORK, hosts).predict(text, 4).step_s
        for text in ("silent", "topk")
        for hosts in (plain, slow)
    }
    copied_s = 2 * 4 * 2e6 / 1e9
    assert times["silent", slow] == pytest.approx(times["silent", plain] + copied_s, rel=0.01)
    # 2 M numbers at 5 M/s take 0.4 s, of which backward hides what it can
    assert times["topk", slow] > times["topk", plain] + 0.2


def test_a_lead_in_is_not_what_a_training_is_like() -> None:
    assert settled(registry.from_text("post-local:exact_steps=500")) == registry.from_text(
        "post-local:exact_steps=0"
    )
    assert settled(registry.from_text("all-reduce")) == registry.from_text("all-reduce")


def test_stay_on_one_machine() -> None:
    made = make_plan(WORK, cluster("8mbit"), [2], strategies=["all-reduce"])
    chosen = made.recommendation
    assert chosen.strategy is None
    assert chosen.workers == 1
    assert chosen.reason.startswith("stay on one machine: ")


def test_exact_sgd_where_the_network_is_fast() -> None:
    chosen = make_plan(WORK, cluster("10gbit"), [8]).recommendation
    assert chosen.strategy is not None
    assert chosen.strategy.startswith("all-reduce")
    assert chosen.speedup > 7


def test_a_lossy_strategy_only_within_the_budget() -> None:
    predictions = make_plan(WORK, cluster("20mbit"), [4]).predictions
    strict, loose = (recommend(predictions, WORK, budget=budget) for budget in (0.0, 1.0))
    assert strict.strategy is None or strict.strategy.startswith("all-reduce")
    assert loose.strategy is not None
    assert not loose.strategy.startswith("all-reduce")
    chosen = next(p for p in predictions if p.strategy == loose.strategy)
    assert chosen.loss is not None
    assert chosen.loss.loss <= 1.0
    # what was not measured is named, and never chosen
    assert any("was not measured" in words or "points" in words for words in strict.passed_over)
    unmeasured = [p for p in predictions if p.loss is None]
    assert unmeasured
    assert best_of(unmeasured, 100.0) is None


def test_the_balance_is_where_waiting_ends() -> None:
    planner = Planner(WORK, cluster())
    found = balance(planner, 4)
    assert found.times is not None
    exact = registry.from_text("all-reduce:overlap=forward")
    at, below = (planner.scaled(found.times * x) for x in (1.0, 0.8))
    assert at.play(exact, 4).step_s <= 1.0501 * at.ceiling_s(4)
    assert below.play(exact, 4).step_s > 1.05 * below.ceiling_s(4)


def test_help_and_sizes_answer_at_once() -> None:
    """A plan says what it plays before torch is imported, and `--help` never imports it."""
    code = (
        "import sys; from thinwire.cli import main; main(['plan', '--help']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the model must be given once, got none"),
        (("--params", "1e6"), "--params needs --compute"),
        (("--params", "-5", "--compute", "0.1s"), "params must be a positive number"),
        (("--params", "1e6", "--compute", "0s"), "compute must be above 0 seconds"),
        (("--net", "resnet50", "--rate", "-5mbit"), "rate must be a bandwidth"),
        (("--net", "resnet50", "--cluster", "nowhere.json"), "nowhere.json cannot be read"),
        (("--net", "resnet50", "--workers", "20000"), "workers must be 2 to 10,000"),
        (("--net", "resnet50", "--accuracy-budget", "-1"), "accuracy budget must be 0 or more"),
        (("--net", "resnet50", "--strategy", "topkk"), "strategy must be one of"),
    ],
)
def test_bad_input_is_answered(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert "hint:" in said or "must be" in said


def test_a_plan_plays_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[tuple[object, int]]()

    def count(shapes: Any, network: Network, strategy: Strategy, *rest: Any, **options: Any) -> StepTimes:
        played.append((strategy, len(network.description.hosts)))
        return step_times(shapes, network, strategy, *rest, **options)

    monkeypatch.setattr("thinwire.planner.predict.step_times", count)
    planner = Planner(Workload.of_sizes(2e5, 6, 0.2), cluster())
    texts, counts = [CEILING, *CANDIDATES], [8, 16, 64, 128, 10_000]
    made = list(planner.predictions(texts, counts))
    assert len(made) == len(texts) * len(counts)
    # those that send to whoever listens are played with at most 16
    assert len(played) == len(set(played)) == len(made) - 3 * 3
    assert set(played) == set(planner.pairs(texts, counts))


def test_the_balance_takes_few_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[float]()

    def waits(times: float) -> float:
        tried.append(times)
        return max(30.0 - 0.9 * times, 0.4)  # in step with what computing leaves to wait for

    found = _least_hidden(waits, 30.0)
    assert found == pytest.approx(30.0 / 0.95, rel=PRECISION - 1)
    assert len(tried) <= 8
    assert _least_hidden(lambda times: times, 1.0) is None
    least = _least_hidden(lambda times: 0.0, 1.0)
    assert least is not None
    assert least <= 2 * LEAST_TIMES


def test_a_second_process_plays_the_same() -> None:
    texts, counts = ["all-reduce", "sasgd"], [2, 4, 8, 16]
    alone = make_plan(WORK, cluster(), counts, strategies=texts)
    with Beside(WORK, cluster(), texts, counts) as beside:
        shared = make_plan(WORK, cluster(), counts, strategies=texts, beside=beside)
    assert shared == alone


def test_the_parts_of_two_processes_are_all() -> None:
    pairs = Planner(WORK, cluster()).pairs(CANDIDATES, [2, 64])
    first, second = parts(pairs)
    assert set(first).isdisjoint(second)
    assert {*first, *second} == set(pairs)
    assert len(first) < len(second)
