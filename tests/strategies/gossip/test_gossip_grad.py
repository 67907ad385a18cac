"""GossipGraD: one peer per step, the mean never moves, whatever is sent however late."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.contract.training import batch, model_and_optimizer, step_once
from tests.engine.saving import Job, run
from tests.strategies.gossip.world import Village
from tests.worlds import run_threads
from thinwire.compress.sizes import Payload
from thinwire.errors import SettingError, UsageError
from thinwire.strategies.gossip.cells import Cells, Place
from thinwire.wire.threads import ThreadWire

PAYLOADS: tuple[Payload, ...] = ("fp32", "bf16", "int8")
SHARES = (1.0, 0.7, 0.25)
SYNCHRONOUS = [
    *(tw.GossipGraD(payload=payload, share=share) for payload in PAYLOADS for share in SHARES),
    tw.GossipGraD(rotate=None, payload="int8", average_every=5),
]
ASYNCHRONOUS = [
    tw.GossipGraD(payload=payload, share=share, asynchronous=True) for payload in PAYLOADS for share in SHARES
]
Case = tuple[tw.GossipGraD, int]


def in_worlds(strategies: list[tw.GossipGraD], any_size: list[int], powers: list[int]) -> list[Case]:
    """Every strategy by both topologies, each in worlds that it allows."""
    cubes = [replace(strategy, topology="hypercube") for strategy in strategies]
    return [*product(strategies, any_size), *product(cubes, powers)]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.GossipGraD(share=0.2, payload="int8")], ids=repr)
def test_one_peer_per_worker_and_step_and_one_message_per_bucket_in_use(
    strategy: tw.GossipGraD, world_size: int
) -> None:
    village = Village(strategy, world_size)
    for _ in range(3 * world_size):
        for wire in village.wires:
            wire.sent.clear()
        village.round()
        for state, wire in zip(village.states, village.wires, strict=True):
            assert state.turn is not None
            assert {to for to, _, _ in wire.sent} == {state.turn.peers.to}
            assert sorted(tag for _, tag, _ in wire.sent) == sorted(state.turn.window.spans)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*in_worlds(SYNCHRONOUS, [2, 7], [4]), *in_worlds(SYNCHRONOUS[1::4], [33], [32])],
    ids=repr,
)
def test_the_sum_over_workers_never_changes(strategy: tw.GossipGraD, world_size: int) -> None:
    village = Village(strategy, world_size, seed=world_size)
    for _ in range(12):
        for rank in range(world_size):
            village.update(rank)
        village.round()
        total = torch.stack([village.flat(rank) for rank in range(world_size)]).sum(0)
        assert (total - village.expected).abs().max() < 1e-12 * world_size


@pytest.mark.parametrize(("strategy", "world_size"), in_worlds(SYNCHRONOUS[:-1], [5], [8]), ids=repr)
def test_nor_where_some_are_a_round_ahead_of_others(strategy: tw.GossipGraD, world_size: int) -> None:
    """Messages arrive at random, and whoever has its own goes on."""
    village = Village(strategy, world_size, seed=world_size)
    rounds, ahead = [0] * world_size, 0
    while min(rounds) < 12:
        village.carry(share=village.random.choice([0.0, 0.1, 0.5]))
        ready = [rank for rank in range(world_size) if rounds[rank] < 12 and village.has_arrived(rank)]
        for rank in ready:
            village.land(rank)
            village.update(rank)
            village.launch(rank)
            rounds[rank] += 1
        ahead = max(ahead, max(rounds) - min(rounds))
    while village.bags:
        village.carry()
    for rank in range(world_size):
        village.land(rank)
    assert ahead > 0
    total = torch.stack([village.flat(rank) for rank in range(world_size)]).sum(0)
    assert (total - village.expected).abs().max() < 1e-12 * world_size


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*in_worlds(ASYNCHRONOUS, [2, 5], [8]), *in_worlds(ASYNCHRONOUS[::4], [33], [32])],
    ids=repr,
)
def test_no_mass_is_lost_however_late_messages_come(strategy: tw.GossipGraD, world_size: int) -> None:
    """Workers step at random, messages arrive at random: values and masses, under way or not, add up."""
    village = Village(strategy, world_size, seed=world_size)
    for _ in range(12):
        for rank in village.random.sample(range(world_size), k=world_size // 2 + 1):
            village.land(rank)
            village.update(rank)
            village.launch(rank)
            village.carry(share=village.random.choice([0.0, 0.1, 0.5]))
        for rank in range(world_size):
            village.land(rank)
        values, masses = village.under_way()
        total = village.total() + values
        assert (total - village.expected).abs().max() < 1e-12 * world_size
        weights = torch.stack([village._by_element(state.masses) for state in village.states]).sum(0) + masses
        assert (weights - world_size).abs().max() < 1e-12 * world_size
    assert sum(state.skipped_rounds for state in village.states) > 0
    village.settle()
    total = village.total()
    assert (total - village.expected).abs().max() < 1e-12 * world_size
    assert not any(state.fixed.mail.arrived for state in village.states if state.fixed.mail)
    village.round()  # and it goes on


@pytest.mark.parametrize("topology", ["dissemination", "hypercube"])
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_log2_rounds_without_updates_give_the_exact_mean(topology: Any, world_size: int) -> None:
    village = Village(tw.GossipGraD(topology=topology), world_size, alike=False)
    for _ in range(world_size.bit_length() - 1):
        village.round()
    for rank in range(world_size):
        assert (village.flat(rank) - village.expected / world_size).abs().max() < 1e-13


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS[2:9:3], *ASYNCHRONOUS[2:9:3]], ids=repr)
def test_workers_come_together(strategy: tw.GossipGraD) -> None:
    """Also where the window's rounds and the schedule's have a common divisor (4 and 4, here)."""
    village = Village(strategy, 16, alike=False)
    for _ in range(60):
        village.round()
    mean = village.expected / 16
    limit = {"fp32": 1e-3, "bf16": 2e-2, "int8": 2e-2}[strategy.payload]
    for rank in range(16):
        assert (village.flat(rank) - mean).abs().max() < limit


def test_every_part_of_the_model_gets_its_turn() -> None:
    cells, place, seen = Cells([1000, 10, 77_777]), Place(), [0] * 300
    count = cells.count(0.3)
    for _ in range(100):
        for cell in cells.window(place, count).cells:
            seen[cell] += 1
    times = seen[: len(cells)]
    assert 250 <= len(cells) <= 260
    assert max(times) - min(times) <= 1


def test_consensus_distance_is_close_to_the_true_one() -> None:
    village = Village(tw.GossipGraD(), 16, alike=False)
    rows = torch.stack([village.flat(rank) for rank in range(16)])
    true = ((rows - rows.mean(0)).square().sum() / rows.square().sum()) ** 0.5
    village.round()
    told = [village.strategy.instruments(state)["consensus_distance"] for state in village.states]
    assert sum(told) / 16 == pytest.approx(float(true), rel=0.1)


# -- with the engine ----------------------------------------------------------------------------------


def make(kind: str, model: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


@pytest.mark.parametrize(
    ("kind", "names"), [("momentum", ["momentum_buffer"]), ("adam", ["exp_avg", "exp_avg_sq"])]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_momentum_travels_along(kind: str, names: list[str], asynchronous: bool) -> None:
    """Two workers that settle have the mean of both weights and momenta."""
    strategy = tw.GossipGraD(exchange="weights+momentum", asynchronous=asynchronous)

    def worker(wire: ThreadWire) -> tuple[list[Any], list[Any], int]:
        model, _ = model_and_optimizer()
        optimizer = make(kind, model)
        with tw.attach(model, optimizer, strategy, process_group=wire, bucket_bytes=256) as link:
            for step in range(5):
                step_once(model, optimizer, step, link.rank)
            link.settle()
            sent, sizes = link.stats.sent_bytes, link.sizes
            assert sizes.momenta == len(names)
        kept = [optimizer.state[p][name].clone() for p in model.parameters() for name in names]
        return [p.detach().clone() for p in model.parameters()], kept, sent

    (weights, kept, sent), (others, other_kept, _) = run_threads(2, worker)
    if not asynchronous:
        for ours, theirs in zip(weights + kept, others + other_kept, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12)
        assert sent >= 5 * 8 * 289 * (1 + len(names))
    for each in kept:
        assert each.isfinite().all()
        assert each.abs().max() > 0


def test_an_optimizer_without_momentum_is_refused_by_name() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(SettingError, match=r"GossipGraD\.exchange must be 'weights' or") as caught:
        tw.attach(model, make("plain", model), tw.GossipGraD(exchange="weights+momentum"))
    assert "AdamW" in caught.value.hint


def test_the_average_brings_all_together_and_is_the_next_reference() -> None:
    strategy = tw.GossipGraD(payload="int8", average_every=3)

    def worker(wire: ThreadWire) -> tuple[list[Any], list[Any]]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=wire, bucket_bytes=256) as link:
            for step in range(3):
                step_once(model, optimizer, step, link.rank)
            link.settle()
            references = link.state_dict()["state"]["memory"]["references"]
            return [p.detach().clone() for p in model.parameters()], references

    outcomes = run_threads(5, worker)
    for weights, references in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(weights, outcomes[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(references, outcomes[0][1], strict=True))


def test_gradients_are_those_of_two_workers() -> None:
    strategy = tw.GossipGraD(exchange="gradients", average_every=10)

    def worker(wire: ThreadWire) -> list[Any]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=wire, bucket_bytes=256):
            x, y = batch(0, wire.rank)
            (model(x) - y).square().mean().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    got = run_threads(3, worker)
    alone = []
    for rank in range(3):
        model, _ = model_and_optimizer()
        x, y = batch(0, rank)
        (model(x) - y).square().mean().backward()
        alone.append([p.grad for p in model.parameters() if p.grad is not None])
    for rank in range(3):
        for grad, own, peer in zip(got[rank], alone[rank], alone[(rank - 1) % 3], strict=True):
            assert torch.allclose(grad, (own + peer) / 2)


def test_nobody_waits_for_a_slow_worker_when_asynchronous() -> None:
    """Worker 0 makes no step before all others have ended theirs."""
    import threading

    others_done = threading.Semaphore(0)

    def worker(wire: ThreadWire) -> dict[str, float]:
        model, optimizer = model_and_optimizer()
        strategy = tw.GossipGraD(asynchronous=True)
        with tw.attach(model, optimizer, strategy, process_group=wire, timeout_s=30) as link:
            if link.rank == 0:
                for _ in range(3):
                    assert others_done.acquire(timeout=20), "the others wait"
            masses = []
            for step in range(8):
                step_once(model, optimizer, step, link.rank)
                masses.append(link.stats.instruments["mass"])
            if link.rank > 0:
                others_done.release()
            else:
                assert max(masses) > 0.5  # it has received: its first message took half of what it had
            assert min(masses) >= 1 / 32  # who has little left keeps it
            link.settle()
            assert link.sum([link.stats.instruments["mass"]])[0] == pytest.approx(4, abs=1e-9)
            return dict(link.stats.instruments)

    told = run_threads(4, worker)
    assert sum(each["late_rounds"] for each in told) > 0


@pytest.mark.parametrize(
    "strategy",
    [tw.GossipGraD(payload="int8", share=0.5), tw.GossipGraD(asynchronous=True), tw.GossipGraD(share="auto")],
    ids=repr,
)
def test_goes_on_with_another_number_of_workers(tmp_path: Path, strategy: tw.GossipGraD) -> None:
    run(3, Job(folder=tmp_path, until=4, save_at=(4,), strategy=strategy))
    for world_size, until in ((2, 6), (4, 8)):
        job = Job(folder=tmp_path, until=until, save_at=(until,), strategy=strategy)
        for each in run(world_size, job):
            assert each.saved is not None
            assert all(weight.isfinite().all() for weight in each.weights)


def test_join_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    strategy = tw.GossipGraD(exchange="gradients", average_every=2)
    link = tw.attach(model, optimizer, strategy)
    with pytest.raises(UsageError, match="has no join"), link.join():
        pass
    link.detach()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topology": "ring"}, "GossipGraD.topology must be one of 'dissemination', 'hypercube', got 'ring'"),
        (
            {"exchange": "all"},
            "GossipGraD.exchange must be one of 'weights', 'weights.momentum', 'gradients'",
        ),
        ({"payload": "fp8"}, "GossipGraD.payload must be one of 'fp32', 'bf16', 'int8', got 'fp8'"),
        ({"share": 0.0}, "GossipGraD.share must be a number above 0 and at most 1, or 'auto', got 0.0"),
        ({"share": 1.5}, "GossipGraD.share must be a number above 0 and at most 1, or 'auto', got 1.5"),
        ({"average_every": -1}, "GossipGraD.average_every must be 0 or more steps, got -1"),
        ({"exchange": "gradients"}, "GossipGraD.average_every must be at least 1 with exchange='gradients'"),
        (
            {"exchange": "gradients", "average_every": 4, "payload": "int8"},
            "GossipGraD.payload must be 'fp32' with exchange='gradients', got 'int8'",
        ),
        ({"asynchronous": True, "average_every": 4}, "GossipGraD.average_every must be 0 with asynchronous"),
        ({"asynchronous": True, "share": "auto"}, "GossipGraD.share must be a number with asynchronous=True"),
    ],
)
def test_wrong_settings_name_field_rule_and_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        tw.GossipGraD(**settings)


def test_a_hypercube_needs_a_power_of_two() -> None:
    with pytest.raises(SettingError, match="topology must be 'dissemination' with 3 workers"):
        Village(tw.GossipGraD(topology="hypercube"), 3)
