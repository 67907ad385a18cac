"""Groups by measured paths: pure cases, and on a virtual network whose sites are known."""

from __future__ import annotations

import logging

import pytest
import torch

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_times
from thinwire.strategies.local.groups import by_paths, meetings
from thinwire.wire.local import LocalLane


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_all_pairs_meet_once(world_size: int) -> None:
    rounds = list(zip(*(meetings(rank, world_size) for rank in range(world_size)), strict=True))
    pairs = [
        frozenset((a, b)) for peers in rounds for a, b in enumerate(peers) if b is not None and peers[b] == a
    ]
    assert len(set(pairs)) == world_size * (world_size - 1) // 2
    assert len(pairs) == 2 * len(set(pairs)), "both know of it, in the same round"


def test_workers_joined_over_others_are_one_group() -> None:
    far, near = 1.0, 0.01
    chain = [[0, near, far, far], [near, 0, near, far], [far, near, 0, far], [far, far, far, 0]]
    assert by_paths(chain) == [[0, 1, 2], [3]]
    assert by_paths([[0.0]]) == [[0]]


def network(uplink: str) -> Network:
    return Network(describe(hosts=6, rate="1gbit", sites="3+3", uplink=uplink), latency_s=0.0005)


def test_sites_are_found_on_a_network(caplog: pytest.LogCaptureFixture) -> None:
    strategy = tw.HierarchicalAveraging(interval=4, groups="measured")
    with caplog.at_level(logging.INFO, "thinwire"):
        thin = step_times([(500, 500)], network("20mbit"), strategy, ComputeModel.of(0.05), steps=8)
    assert "[[0, 1, 2], [3, 4, 5]]" in caplog.text
    by_name = step_times(
        [(500, 500)], network("20mbit"), tw.HierarchicalAveraging(interval=4), ComputeModel.of(0.05), steps=8
    )
    assert thin.step_s == pytest.approx(by_name.step_s)
    assert thin.sent_bytes == pytest.approx(by_name.sent_bytes)


def test_where_paths_are_alike_all_are_one_group(caplog: pytest.LogCaptureFixture) -> None:
    strategy = tw.HierarchicalAveraging(interval=4, groups="measured")
    alike = Network(describe(hosts=5, rate="1gbit"), latency_s=0.0005)
    with caplog.at_level(logging.INFO, "thinwire"):
        step_times([(500, 500)], alike, strategy, ComputeModel.of(0.05), steps=4)
    assert "[[0, 1, 2, 3, 4]]" in caplog.text


@pytest.mark.parametrize("inside", ["models", "gradients"])
def test_measured_groups_train(inside: str) -> None:
    """Whatever was measured here, all agree on it, and agree after a step over all."""
    strategy = tw.HierarchicalAveraging(interval=4, groups="measured", inside=inside)  # type: ignore[arg-type]

    def train(lane: LocalLane) -> list[torch.Tensor]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES):
            for step in range(8):
                step_once(model, optimizer, step, lane.rank)
            return [p.detach().clone() for p in model.parameters()]

    everyone = run_threads(4, train)
    for weights in everyone:
        assert all(torch.equal(a, b) for a, b in zip(weights, everyone[0], strict=True))
