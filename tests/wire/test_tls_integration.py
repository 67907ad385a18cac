"""TLS lanes of real processes: every operation, the same training as over Gloo, and lost workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.strategies.test_stochastic_gradient_push import STRATEGIES as PUSHES
from tests.strategies.test_stochastic_gradient_push import check_training
from tests.wire.operations import check_all, check_lanes, total
from tests.wire.test_process_group_integration import receive_in_any_order_on, reduce_large_parts, use_wires
from tests.wire.tls import make_certificate
from tests.worlds import Processes, run_processes
from thinwire.strategies.base import Strategy
from thinwire.wire.backend import own_pools
from thinwire.wire.base import Lane
from thinwire.wire.connect import connect
from thinwire.wire.tls.files import load

pytestmark = pytest.mark.processes
SAME: list[Strategy] = [
    tw.AllReduce(),
    tw.AllReduce(overlap="forward"),
    tw.GossipGraD(),
    tw.GTopK(density=0.05),
    tw.SASGD(interval=4),
    tw.Trickle(interval=2, density=0.1),
]
"""Strategies whose numbers do not depend on time."""
STEPS = 6


def lane_over(certificate: Path) -> Lane:
    lane = connect(None, 500, 500, load(certificate))
    assert lane is not None
    return lane


def use_everything(certificate: Path) -> int:
    for _ in range(2):
        lane = lane_over(certificate)
        reduce_large_parts(lane)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            check_all(lane, dtype)
        check_lanes(lane)
        use_wires(lane)
        total(lane, torch.zeros(1)).wait()
        lane.close()
        assert own_pools == []
    return len(os.listdir("/proc/self/fd"))


def test_every_operation(tmp_path: Path) -> None:
    run_processes(3, use_everything, make_certificate(tmp_path))


def in_any_order(certificate: Path) -> list[int]:
    return receive_in_any_order_on(lane_over(certificate))


def test_receives_end_when_their_message_comes(tmp_path: Path) -> None:
    assert run_processes(2, in_any_order, make_certificate(tmp_path))[0] == [2, 0, 3, 1]


def sums(certificate: Path) -> list[tuple[Tensor, Tensor]]:
    """All-reduces of float32, over Gloo and over TLS: sizes below, at and above those of segments."""
    lanes = [connect(None, 500, 500), lane_over(certificate)]
    found = []
    for size in (1, 2, 5, 7, 1000, 1_000_003, 3_000_000):
        generator = torch.Generator().manual_seed(size)
        rank = 0 if lanes[0] is None else lanes[0].rank
        numbers = torch.randn(rank + 1, size, generator=generator)[rank]
        both = [numbers.clone() for _ in lanes]
        for lane, data in zip(lanes, both, strict=True):
            assert lane is not None
            total(lane, data).wait()
        found.append((both[0], both[1]))
    for lane in lanes:
        assert lane is not None
        lane.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_have_the_bits_of_gloo(world_size: int, tmp_path: Path) -> None:
    for pairs in run_processes(world_size, sums, make_certificate(tmp_path)):
        for over_gloo, over_tls in pairs:
            assert torch.equal(over_gloo, over_tls)


def train(strategy: Strategy, wire: tw.TLS | None) -> list[Tensor]:
    model, optimizer = model_and_optimizer(seed=int(torch.distributed.get_rank()))
    with tw.attach(
        model, optimizer, strategy, bucket_bytes=256, buffers="local", wire=wire or "plain"
    ) as link:
        for step in range(STEPS):
            step_once(model, optimizer, step, link.rank)
        link.synchronize()
        return [p.detach().clone() for p in model.parameters()]


def train_all(certificate: Path) -> list[tuple[list[Tensor], list[Tensor]]]:
    wire = tw.TLS(file=str(certificate))
    return [(train(strategy, None), train(strategy, wire)) for strategy in SAME]


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_has_the_bits_of_gloo(world_size: int, tmp_path: Path) -> None:
    for found in run_processes(world_size, train_all, make_certificate(tmp_path)):
        for strategy, (over_gloo, over_tls) in zip(SAME, found, strict=True):
            for ours, theirs in zip(over_tls, over_gloo, strict=True):
                assert torch.equal(ours, theirs), strategy


def push(certificate: Path) -> None:
    for strategy in PUSHES:
        check_training(strategy, lane_over(certificate))


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_push_sum_loses_nothing(world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, push, make_certificate(tmp_path))


def lose_one(certificate: Path) -> str:
    model, optimizer = model_and_optimizer()
    try:
        with tw.attach(model, optimizer, tw.AllReduce(), wire=tw.TLS(file=str(certificate))) as link:
            for step in range(1000):
                if (link.rank, step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                step_once(model, optimizer, step, link.rank)
    except tw.errors.PeerLost as error:
        return f"{error.rank}: {error.message}"
    return "nobody was lost"


def test_a_lost_worker_is_named(tmp_path: Path) -> None:
    processes = Processes(3, lose_one, make_certificate(tmp_path))
    try:
        outcomes = [processes.outcome(rank, 60.0) for rank in (0, 2)]
    finally:
        processes.kill()
    for well, result in outcomes:
        assert well, result
        assert b"1: worker 1 on " in result


def with_two_certificates(own: Path, others: Path) -> str:
    rank = torch.distributed.get_rank()
    try:
        connect(None, 30, 30, load(own if rank == 0 else others))
    except tw.errors.PeerDiffers as error:
        return str(error)
    return "connected"


def test_another_certificate_is_named(tmp_path: Path) -> None:
    files = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    for told in run_processes(2, with_two_certificates, *files):
        assert "certificate" in told
        assert "copy the same file" in told
