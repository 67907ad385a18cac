"""DiLoCo with workers of unequal speed: weighted merges, and rounds that do not wait for late ones."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, model_and_optimizer, step_once
from tests.simulate.training import COMPUTE_S, STEPS, on_the_clock, weights
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.strategies.base import Strategy
from thinwire.strategies.local.quorum import QuorumRound
from thinwire.wire.local import LocalLane


def trained(strategy: Strategy, world_size: int, steps: int) -> list[list[Tensor]]:
    def train(lane: LocalLane) -> list[Tensor]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            for step in range(steps):
                step_once(model, optimizer, step, lane.rank)
            link.synchronize()
            return [p.detach().clone() for p in model.parameters()]

    return run_threads(world_size, train)


@pytest.mark.parametrize("payload", ["fp32", "int8"])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (3, 2)])
def test_who_saw_more_samples_counts_more(fragments: int, delay: int, payload: Any) -> None:
    """Two workers of constant speed, with 1 and 3 samples: the mean is by samples, whatever travels."""
    interval, steps = 3, 12
    strategy = tw.DiLoCo(
        interval=interval,
        fragments=fragments,
        delay=delay,
        payload=payload,
        outer_lr=1.0,
        outer_momentum=0.0,
        merge="samples",
    )

    def train(lane: LocalLane) -> Tensor:
        model = nn.Linear(64, 64, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with tw.attach(model, optimizer, strategy, process_group=lane) as link:
            for _ in range(steps):
                optimizer.zero_grad()
                for _ in range(2):  # accumulated: what was told for a step adds up
                    link.weight(0.5 if lane.rank == 0 else 1.5)
                    (model.weight.sum() * (1.0 if lane.rank == 0 else 5.0) / 2).backward()
                optimizer.step()
            link.synchronize()
            return link.state_dict()["leaves"]["anchor"]["weight"]  # type: ignore[no-any-return]

    mean = -(1 * 1 + 3 * 5) / 4  # of a step
    for anchor in run_threads(2, train):
        steps_of_anchor = float(anchor[0, 0]) / mean
        assert steps_of_anchor == pytest.approx(round(steps_of_anchor), abs=0.02)
        assert anchor.mean() == pytest.approx(steps * mean, rel=0.15 if fragments > 1 else 0.01)


def test_samples_that_are_the_same_change_nothing() -> None:
    plain, told = (trained(tw.DiLoCo(interval=2, merge=merge), 3, 9) for merge in ("equal", "samples"))
    for a, b in zip(plain[1], told[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 0), (2, 2)])
def test_a_quorum_of_all_is_diloco(fragments: int, delay: int) -> None:
    settings = {"interval": 3, "fragments": fragments, "delay": delay}
    ours, theirs = (trained(tw.DiLoCo(**settings, quorum=quorum), 3, 10) for quorum in (0.99, 1.0))  # type: ignore[arg-type]
    for a, b in zip(ours[2], theirs[2], strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


class Ledger:
    """Writes down which offers the rounds have counted, by worker."""

    def __init__(self) -> None:
        self.counted: Counter[int] = Counter()
        self._pending: dict[int, Counter[int]] = {}
        self._rounds: list[QuorumRound] = []
        """So that no two of them ever have the same id."""
        self._add, self._close = QuorumRound.add, QuorumRound.close

    def add(self, round_: QuorumRound, source: int, moved: Tensor, weight: float) -> bool:
        self._rounds.append(round_)
        self._pending.setdefault(id(round_), Counter())[source] += round(-float(moved.sum()))
        return self._add(round_, source, moved, weight)

    def close(self, round_: QuorumRound, outer: Any) -> list[int]:
        self.counted.update(self._pending.pop(id(round_), Counter()))
        return self._close(round_, outer)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 2)])
def test_late_workers_lose_nothing_and_all_agree_on_the_anchor(fragments: int, delay: int, seed: int) -> None:
    """Workers change every number by 1 in every step: what rounds have counted, and what a worker still has
    of its own, are all its steps."""
    world_size, steps, interval, numel = 4, 23, 3, 48
    strategy = tw.DiLoCo(
        interval=interval, fragments=fragments, delay=delay, quorum=0.5, grace=0.001, outer_momentum=0.5
    )
    ledger = Ledger()

    def train(lane: LocalLane) -> tuple[Tensor, Tensor, float]:
        model = nn.Linear(numel // 4, 4, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        draw = random.Random(f"{seed} {lane.rank}")
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=64) as link:
            for step in range(steps):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                time.sleep(draw.choice([0.0, 0.0, 0.004]) + 0.002 * (lane.rank == 3))
                if step == 11:
                    link.synchronize()  # in the middle, with offers under way
            anchor = link.state_dict()["leaves"]["anchor"]["weight"]
            return anchor, model.weight.detach().clone(), link.stats.instruments["late_rounds"]

    with (
        patch.object(QuorumRound, "add", lambda round_, *given: ledger.add(round_, *given)),  # noqa: PLW0108  # bound to the round
        patch.object(QuorumRound, "close", lambda round_, outer: ledger.close(round_, outer)),  # noqa: PLW0108
    ):
        outcomes = run_threads(world_size, train)
    for rank, (anchor, weight, _) in enumerate(outcomes):
        assert torch.equal(anchor, outcomes[0][0]), "one anchor"
        own = (anchor - weight).sum()
        assert ledger.counted[rank] + float(own) == pytest.approx(steps * numel, abs=1e-6)
        assert (anchor - weight).min() > -1e-9, "nothing was counted twice"
    assert sum(late for *_, late in outcomes) > 0


def test_others_keep_their_speed_beside_a_late_one() -> None:
    """Three quarters suffice, after no grace: the fast workers never wait for the slow one."""
    start, slow = weights(), ("3=0.4",)
    strategy = tw.DiLoCo(interval=5, quorum=0.75, grace=0.0)
    ended_s, waited_s = dict[int, float](), dict[int, float]()
    models, session = on_the_clock(
        strategy, 4, start, dropout=False, batched=True, slow=slow, ended_s=ended_s
    )
    on_the_clock(tw.DiLoCo(interval=5), 4, start, dropout=False, batched=True, slow=slow, ended_s=waited_s)
    assert max(ended_s[host] for host in range(3)) < 1.5 * STEPS * COMPUTE_S
    assert min(waited_s.values()) > 2.4 * STEPS * COMPUTE_S
    assert session.stats(3).instruments["late_rounds"] > 0
    assert session.stats(0).instruments["late_rounds"] == 0
    assert all(torch.isfinite(p).all() for model in models for p in model)


def test_grace_waits_for_who_is_a_little_late() -> None:
    start, slow = weights(), ("3=0.8",)
    late = []
    for grace in (0.0, 0.3):
        strategy = tw.DiLoCo(interval=5, quorum=0.5, grace=grace)
        _, session = on_the_clock(strategy, 4, start, dropout=False, batched=True, slow=slow)
        late.append(session.stats(3).instruments["late_rounds"])
    assert late[0] > 0 == late[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quorum": 0.0}, "DiLoCo.quorum must be above 0"),
        ({"quorum": 0.5, "payload": "int8"}, "DiLoCo.quorum must be 1 with gossip, a payload or a density"),
        ({"quorum": 0.5, "gossip": True}, "DiLoCo.quorum"),
        ({"grace": -1.0}, "DiLoCo.grace"),
        ({"merge": "samples", "gossip": True}, "DiLoCo.merge must be 'equal' with gossip"),
        ({"merge": "tokens"}, "DiLoCo.merge must be one of 'equal', 'samples', got 'tokens'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        tw.DiLoCo(**settings)
