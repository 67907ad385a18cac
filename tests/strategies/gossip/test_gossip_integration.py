"""Gossip by the clock over real Gloo processes: nothing is lost, and everything ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import run_processes

STEPS = 12


def train_twice() -> list[dict[str, float]]:
    """Asynchronously with one slow worker and a pause in between, then with share="auto"."""
    told: list[dict[str, float]] = []
    for strategy in (
        tw.GossipGraD(asynchronous=True, payload="int8", share=0.6),
        tw.GossipGraD(share="auto"),
    ):
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, bucket_bytes=256, timeout_s=60) as link:
            for step in range(STEPS):
                if link.rank == 0:
                    time.sleep(0.01)
                step_once(model, optimizer, step, link.rank)
                if step == STEPS // 2:
                    with link.averaged():
                        pass
            link.settle()
            values: Any = link.stats.instruments
            if "mass" in values:
                assert link.sum([values["mass"]])[0] == pytest.approx(link.world_size, abs=1e-9)
            assert link.consensus_distance() < 1
            told.append(dict(values))
    return told


@pytest.mark.processes
def test_it_follows_the_clock_over_gloo() -> None:
    for asynchronous, automatic in run_processes(3, train_twice):
        assert asynchronous["payload_bits"] == 8
        assert 0 < automatic["share"] <= 1
