"""Trickle(budget="auto"): what is chosen fits behind the compute, is agreed on, and is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_ends, step_times
from thinwire.strategies.local.budget import DECIDES_AT
from thinwire.strategies.local.expected import known, options
from thinwire.strategies.local.tuner import MOST
from thinwire.wire.local import LocalLane

FIVE_MILLION = [(250, 500)] * 40


def played(rate: str, strategy: tw.Trickle, hosts: int = 4) -> Any:
    network = Network(describe(hosts=hosts, rate=rate), latency_s=0.0004)
    return step_times(FIVE_MILLION, network, strategy, ComputeModel.of(0.3), steps=32)


@pytest.mark.parametrize("rate", ["200mbit", "8mbit", "5mbit"])
def test_the_most_accurate_setting_that_fits_is_chosen(rate: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = [tw.Trickle(interval=row.interval, density=row.density) for row in options(4)]
    row, best = next(
        pair for pair in zip(options(4), plain, strict=True) if played(rate, pair[1]).step_s < 0.3 / 0.97
    )
    with caplog.at_level(logging.INFO, "thinwire"):
        times = played(rate, tw.Trickle(budget="auto"))
    assert f"Trickle(interval={row.interval}, density={row.density:g})" in caplog.text
    assert f"expect {row.points:.1f} points less accuracy than exact SGD" in caplog.text
    assert times.step_s < 0.3 / 0.97, "nothing is waited for"
    assert times.sent_bytes == pytest.approx(played(rate, best).sent_bytes, rel=0.05)


def test_where_nothing_fits_the_quickest_is_chosen_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        played("100kbit", tw.Trickle(budget="auto"))
    assert "interval=8, density=1" in caplog.text
    assert "a step, more than" in caplog.text


def test_an_interval_is_no_longer_than_accuracy_allows(caplog: pytest.LogCaptureFixture) -> None:
    """20 MB take 12 s at 20 Mbit/s, 0.25 s at 1 Gbit/s: on the thinner wire training waits instead."""
    ends = {}
    for rate in ("20mbit", "1gbit"):
        network = Network(describe(hosts=4, rate=rate), latency_s=0.0004)
        strategy = tw.SASGD(interval="auto")
        steps = [6 * MOST, 9 * MOST]
        with caplog.at_level(logging.INFO, "thinwire"):
            began_s, ended_s = step_ends(FIVE_MILLION, network, strategy, ComputeModel.of(0.3), steps)
        ends[rate] = (ended_s - began_s) / (3 * MOST)
        if rate == "20mbit":
            assert f"reductions every {MOST} steps from now on; the wire asks for" in caplog.text
    assert ends["20mbit"] == pytest.approx(0.3 + 12 / MOST, rel=0.05)
    assert ends["1gbit"] < 0.3 / 0.94


def test_options_are_of_the_nearest_number_of_workers() -> None:
    measured = {row.workers for row in known()}
    assert {row.workers for row in options(1)} == {min(measured)}
    assert {row.workers for row in options(1000)} == {max(measured)}
    losses = [row.points for row in options(1)]
    assert losses == sorted(losses)


def test_bytes_are_those_of_the_table() -> None:
    for row in options(4):
        sent = played("1gbit", tw.Trickle(interval=row.interval, density=row.density)).sent_bytes
        dense = 2 * 3 / 4 * 4 * 5_000_000
        assert sent / dense == pytest.approx(row.bytes_share, rel=0.1)


def trained(lane: LocalLane, steps: range, folder: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, optimizer = model_and_optimizer()
    strategy = tw.Trickle(budget="auto")
    with (
        tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link,
        tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint,
    ):
        checkpoint.load()
        for step in steps:
            step_once(model, optimizer, step, lane.rank)
        checkpoint.save(steps.stop)
        state = link.state_dict()
    return [p.detach().clone() for p in model.parameters()], state


@pytest.mark.parametrize("stops_at", [5, DECIDES_AT + 4])
def test_the_choice_is_agreed_on_and_outlives_a_checkpoint(stops_at: int, tmp_path: Path) -> None:
    """Before it is made, measuring begins anew; after that, also other numbers of workers keep it."""
    first = run_threads(2, lambda lane: trained(lane, range(stops_at), tmp_path))
    second = run_threads(3, lambda lane: trained(lane, range(stops_at, stops_at + 24), tmp_path))
    anchors = [state["leaves"]["anchor"] for _, state in second]
    for anchor in anchors:
        assert all(torch.equal(anchor[name], anchors[0][name]) for name in anchor)
    chosen = [state["plain"][0]["chosen"] for _, state in (*first, *second)]
    if stops_at < DECIDES_AT:
        assert chosen[:2] == [-1, -1]
    else:
        assert len(set(chosen)) == 1
    assert chosen[2] >= 0


@pytest.mark.parametrize(
    "settings", [{"interval": 4}, {"density": 0.1}, {"fragments": 2}, {"delay": 2}], ids=str
)
def test_a_budget_chooses_alone(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="Trickle"):
        tw.Trickle(budget="auto", **settings)
