"""Recipes on the virtual clock: events as of a real run, and workers that come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sorted_recipes import sorted_by_class
from thinwire.errors import PeerLost, SettingError
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Progress, RunEnded, RunStarted, Summary
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Recipe
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.virtual import SimulationResult, VirtualCluster, simulate

RECIPE = registry.get("digits-cnn")


def config(
    *,
    strategy: str = "all-reduce",
    workers: int = 4,
    epochs: int = 1,
    batch_size: int = 32,
    shuffle: str = "dealt",
) -> RunConfig:
    return resolve(
        "digits-cnn",
        strategy,
        workers=workers,
        epochs=epochs,
        batch_size=batch_size,
        device="cpu",
        shuffle=shuffle,
    )


def run(
    folder: Path,
    settings: RunConfig,
    *faults: str,
    jitter: float = 0.0,
    slow: tuple[str, ...] = (),
    recipe: Recipe = RECIPE,
) -> SimulationResult:
    description = describe(hosts=settings.workers, rate="100mbit", faults=faults, slow=slow)
    cluster = VirtualCluster(
        description=description,
        latency_s=0.001,
        compute_s=0.1,
        recovery_s=0.5,
        jitter=jitter,
        bucket_bytes=2**24,  # one bucket, so that step times can be told by arithmetic
    )
    return simulate(recipe, settings, cluster, folder)


def test_a_density_too_small_for_so_few_steps_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = run(tmp_path / "few", config(strategy="gtopk:density=0.01", batch_size=96)).summary.advice
    assert told.startswith("GTopK with density=0.01 changes a parameter 0.04 times in 4 steps")
    assert told in caplog.text
    caplog.clear()
    assert run(tmp_path / "exact", config(batch_size=96)).summary.advice == ""
    assert not caplog.records


def test_events_read_like_those_of_a_real_run(tmp_path: Path) -> None:
    simulated = run(tmp_path, config(epochs=2))
    records = [event.record for event in read_events(tmp_path)]
    started = [r for r in records if isinstance(r, RunStarted)]
    assert len(started) == 4
    assert started[0].config["clock"] == "virtual"
    evaluated = [r for r in records if isinstance(r, Evaluated)]
    assert [r.epoch for r in evaluated] == [1, 2]
    assert evaluated[-1].train_s == simulated.summary.train_s
    assert evaluated[-1].distance == 0.0
    ended = [r for r in records if isinstance(r, RunEnded)]
    assert sum(r.samples for r in ended) == 2 * 1436
    summary = next(r for r in records if isinstance(r, Summary))
    assert summary == simulated.summary
    assert summary.steps == 24
    # a step is what it computes and, with one bucket, what it sends after that
    one = 6 * 0.001 + summary.sent_bytes_per_step / 12.5e6
    assert summary.train_s == pytest.approx(24 * (0.1 + one), rel=0.01)
    assert summary.exposed_share == pytest.approx(one / (0.1 + one), rel=0.01)
    assert any(isinstance(r, Progress) for r in records)


def test_same_seed_same_run(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, config(), jitter=0.2) for name in ("a", "b"))
    assert first.summary == second.summary
    assert run(tmp_path / "c", replace(config(), seed=1)).summary.loss != first.summary.loss


def test_workers_that_never_talk_drift_apart(tmp_path: Path) -> None:
    silent = run(tmp_path, config(strategy="silent"))
    assert silent.distance > 0.01
    assert silent.summary.sent_bytes == 0


def test_the_slowest_sets_the_pace(tmp_path: Path) -> None:
    even = run(tmp_path / "even", config())
    slow = run(tmp_path / "slow", config(), slow=("3=0.5",))
    assert slow.summary.train_s == pytest.approx(even.summary.train_s + 12 * 0.1, rel=0.01)
    assert slow.summary.loss == even.summary.loss


def test_one_is_lost_one_joins_and_every_sample_is_used_once(tmp_path: Path) -> None:
    simulated = run(tmp_path, config(epochs=2), "kill:host=2,step=4", "rejoin:host=2,step=9")
    assert "1437 samples: 1436 trained once, 0 more often, 1 never" in simulated.accounts[0]
    assert "128 dealt again after a loss" in simulated.accounts[0]
    assert [words.partition("s: ")[2] for words in simulated.happened] == [
        "kill:host=2,step=4",
        "3 workers go on",
        "rejoin:host=2,step=9",
        "4 workers go on",
    ]
    assert simulated.distance == 0.0
    assert simulated.summary.value is not None
    assert simulated.summary.value > 0.5
    ended = [e.record for e in read_events(tmp_path) if isinstance(e.record, RunEnded)]
    assert sum(r.samples for r in ended) == 2 * 1436


def test_what_a_strategy_tells_of_itself_is_in_the_events(tmp_path: Path) -> None:
    simulated = run(tmp_path, config(strategy="stochastic-gradient-push"), slow=("3=0.5",))
    told = simulated.summary.instruments
    assert told["mass"] == pytest.approx(1)
    assert told["late_rounds"] > 0
    progress = [e.record for e in read_events(tmp_path) if isinstance(e.record, Progress)]
    assert progress[-1].instruments.keys() == told.keys()


@pytest.mark.parametrize(
    "strategy",
    [
        *("silent", "all-reduce", "gossip-grad:payload=int8:average_every=3"),
        *("gossip-grad:share=auto", "stochastic-gradient-push"),
    ],
)
def test_a_worker_lost_by_time(tmp_path: Path, strategy: str) -> None:
    simulated = run(tmp_path, config(strategy=strategy), "kill:host=0,after=0.35")
    assert " 0 more often" in simulated.accounts[0]
    assert "3 workers go on" in simulated.happened[-1]


@pytest.mark.parametrize("after", ["0.31", "0.36", "0.41"])
@pytest.mark.parametrize(
    "strategy", ["gossip-grad:share=0.3", "downpour", "easgd:interval=2", "sasgd:interval=4"]
)
def test_workers_at_different_steps_go_on_together(tmp_path: Path, strategy: str, after: str) -> None:
    """Who has come furthest says where in the pattern of rounds all go on; it was each by itself before."""
    faults = f"kill:host=0,after={after}", f"kill:host=1,after={after}", "rejoin:host=1,step=8"
    simulated = run(tmp_path, config(strategy=strategy, epochs=2, workers=5), *faults, slow=("3=0.4",))
    assert " 0 more often" in simulated.accounts[0]
    assert "4 workers go on" in simulated.happened[-1]


def test_another_is_lost_while_those_who_are_left_recover(tmp_path: Path) -> None:
    simulated = run(tmp_path, config(), "kill:host=0,after=0.35", "kill:host=3,after=0.6")
    assert [words.partition("s: ")[2] for words in simulated.happened] == [
        "kill:host=0,after=0.35",
        "kill:host=3,after=0.6",
        "3 workers go on",
        "2 workers go on",
    ]
    assert " 0 more often" in simulated.accounts[0]


def test_another_joins_when_some_have_stopped_for_the_first(tmp_path: Path) -> None:
    """They went on to another step then, in which those who had stopped were waited for."""
    lost = "kill:host=2,after=0.3", "kill:host=1,after=0.3"
    back = "rejoin:host=2,after=2.48", "rejoin:host=1,after=2.58"
    simulated = run(tmp_path, config(strategy="gossip-grad", epochs=2), *lost, *back, slow=("3=0.6",))
    assert "4 workers go on" in simulated.happened[-1]


def test_slow_pause_and_cut(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", config()).summary.train_s
    for number, (fault, more_s) in enumerate(
        [
            ("slow:host=1,step=2,speed=0.5,seconds=1", 0.5),
            ("pause:host=1,step=2,seconds=1", 1.0),
            ("cut:host=1,step=2,seconds=1", 0.9),
        ]
    ):
        found = run(tmp_path / str(number), config(), fault).summary.train_s
        assert found - plain == pytest.approx(more_s, abs=0.15), fault


def test_all_are_lost(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="all workers were killed"):
        run(tmp_path, config(workers=2), "kill:host=0,step=2", "kill:host=1,step=2")


def test_a_cut_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"fault cut must be given seconds= in a simulation"):
        run(tmp_path, config(), "cut:host=1,step=2")


def test_samples_that_travel_make_up_for_shards_sorted_by_class(tmp_path: Path) -> None:
    """Workers that never talk know only what they have seen."""
    by_class, settings = sorted_by_class(RECIPE), config(strategy="silent", epochs=2, batch_size=16)
    own, ring = (
        run(tmp_path / shuffle, replace(settings, shuffle=shuffle), recipe=by_class)
        for shuffle in ("own", "ring")
    )
    assert own.summary.value is not None
    assert ring.summary.value is not None
    assert own.summary.value < 0.4 < 0.6 < ring.summary.value
    for simulated in (own, ring):
        for epoch in range(2):
            assert "1437 samples: 1436 trained once, 0 more often, 1 never" in simulated.accounts[epoch]
    assert own.summary.sent_bytes == 0
    # three of four samples, of 64 bytes and a label of 8, travel once in an epoch
    assert ring.summary.sent_bytes == pytest.approx(2 * 3 / 4 * 1436 * 72, rel=0.01)
    assert ring.summary.messages == 2 * 23 * 4
    assert ring.summary.train_s == pytest.approx(own.summary.train_s, rel=0.01)


def test_a_slow_path_is_waited_for_by_samples_too(tmp_path: Path) -> None:
    settings = config(strategy="silent", shuffle="ring")
    description = describe(hosts=4, rate="100kbit")  # a batch's 1,728 bytes take 0.14 s
    simulated = simulate(
        RECIPE, settings, VirtualCluster(description=description, latency_s=0.001, compute_s=0.1), tmp_path
    )
    assert 12 * 0.138 < simulated.summary.train_s < 1.4 * 12 * 0.138  # not 12 * 0.1
    assert simulated.summary.exposed_share > 0.2


@pytest.mark.parametrize("shuffle", ["own", "ring"])
def test_a_worker_that_alone_holds_its_samples_cannot_be_lost(tmp_path: Path, shuffle: str) -> None:
    with pytest.raises(SettingError, match=f"'dealt' where workers are lost or join, got '{shuffle}' with k"):
        run(tmp_path, config(shuffle=shuffle), "kill:host=1,step=2")
