"""share="auto" over real Gloo processes: workers agree on what fits, and everything ends."""

from __future__ import annotations

import time

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import run_processes

STEPS = 12


def train() -> dict[str, float]:
    """With one slow worker and a pause in between; the instruments."""
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, tw.GossipGraD(share="auto"), bucket_bytes=256, timeout_s=500) as link:
        for step in range(STEPS):
            if link.rank == 0:
                time.sleep(0.01)
            step_once(model, optimizer, step, link.rank)
            if step == STEPS // 2:
                with link.averaged():
                    pass
        link.synchronize()
        assert link.consensus_distance() < 1
        return dict(link.stats.instruments)


@pytest.mark.processes
def test_the_share_follows_the_clock_over_gloo() -> None:
    shares = {instruments["share"] for instruments in run_processes(3, train)}
    assert len(shares) == 1, "all agree"
    assert 0 < shares.pop() <= 1
