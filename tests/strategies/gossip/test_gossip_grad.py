"""GossipGraD: one peer per step, and the mean over workers never moves, whatever the payload."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.engine.saving import Job, run
from tests.strategies.gossip.world import GossipWorld
from tests.worlds import run_threads
from thinwire.compress.payload import Payload
from thinwire.errors import SettingError, UsageError
from thinwire.strategies.gossip.chunks import Chunks, WindowPosition
from thinwire.strategies.gossip.encoding import Encoding
from thinwire.wire.local import LocalLane

SHARES = (1.0, 0.7, 0.25)
PLAIN = [tw.GossipGraD(payload=payload, share=share) for payload in get_args(Payload) for share in SHARES]
WITH_AVERAGE = tw.GossipGraD(rotate=None, payload="int8", average_every=5)
Case = tuple[tw.GossipGraD, int]


def in_worlds(strategies: list[tw.GossipGraD], any_size: list[int], powers: list[int]) -> list[Case]:
    """Every strategy by both topologies, each in worlds that it allows."""
    cubes = [replace(strategy, topology="hypercube") for strategy in strategies]
    return [*product(strategies, any_size), *product(cubes, powers)]


def check_sum(world: GossipWorld) -> None:
    assert (world.weighted_sum() - world.expected).abs().max() < 1e-12 * world.world_size


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.GossipGraD(share=0.2, payload="int8")], ids=repr)
def test_one_peer_per_worker_and_step_and_one_message_per_bucket_in_use(
    strategy: tw.GossipGraD, world_size: int
) -> None:
    world = GossipWorld(strategy, world_size)
    for _ in range(3 * world_size):
        world.medium.sent.clear()
        world.round()
        for rank, state in enumerate(world.states):
            assert state.round is not None
            sent = [(to, num_bytes) for source, to, num_bytes in world.medium.sent if source == rank]
            spans = state.round.window.spans.values()
            sizes = [Encoding(each, 8, strategy.payload, 0).num_bytes for each in spans]
            assert sorted(sent) == sorted((state.round.peers.to, size) for size in sizes)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*in_worlds([*PLAIN, WITH_AVERAGE], [2, 7], [4]), *in_worlds(PLAIN[1::4], [33], [32])],
    ids=repr,
)
def test_the_sum_over_workers_never_changes(strategy: tw.GossipGraD, world_size: int) -> None:
    world = GossipWorld(strategy, world_size, seed=world_size)
    for _ in range(12):
        for rank in range(world_size):
            world.update(rank)
        world.round()
        check_sum(world)


@pytest.mark.parametrize(("strategy", "world_size"), in_worlds(PLAIN, [5], [8]), ids=repr)
def test_nor_where_some_are_a_round_ahead_of_others(strategy: tw.GossipGraD, world_size: int) -> None:
    """Messages arrive at random, and whoever has its own goes on."""
    world = GossipWorld(strategy, world_size, seed=world_size)
    rounds, ahead = [0] * world_size, 0
    while min(rounds) < 12:
        world.carry(share=world.random.choice([0.0, 0.1, 0.5]))
        ready = [rank for rank in range(world_size) if rounds[rank] < 12 and world.has_arrived(rank)]
        for rank in ready:
            world.land(rank)
            world.update(rank)
            world.launch(rank)
            rounds[rank] += 1
        ahead = max(ahead, max(rounds) - min(rounds))
    world.synchronize()
    assert ahead > 0
    check_sum(world)


@pytest.mark.parametrize("topology", ["dissemination", "hypercube"])
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_log2_rounds_without_updates_give_the_exact_mean(topology: Any, world_size: int) -> None:
    world = GossipWorld(tw.GossipGraD(topology=topology), world_size, alike=False)
    for _ in range(world_size.bit_length() - 1):
        world.round()
    for rank in range(world_size):
        assert (world.flat(rank) - world.expected / world_size).abs().max() < 1e-13


@pytest.mark.parametrize("strategy", PLAIN[2::3], ids=repr)
def test_workers_come_together(strategy: tw.GossipGraD) -> None:
    """Also where the window's rounds and the schedule's have a common divisor (4 and 4, here)."""
    world = GossipWorld(strategy, 16, alike=False)
    for _ in range(60):
        world.round()
    mean = world.expected / 16
    limit = {"fp32": 1e-3, "bf16": 2e-2, "int8": 2e-2}[strategy.payload]
    for rank in range(16):
        assert (world.flat(rank) - mean).abs().max() < limit


def test_every_part_of_the_model_gets_its_turn() -> None:
    chunks, position, seen = Chunks([1000, 10, 77_777]), WindowPosition(), [0] * 300
    count = chunks.count(0.3)
    for _ in range(100):
        for chunk in chunks.window(position, count).chunks:
            seen[chunk] += 1
    times = seen[: len(chunks)]
    assert 250 <= len(chunks) <= 260
    assert max(times) - min(times) <= 1


def test_consensus_distance_is_close_to_the_true_one() -> None:
    strategy = tw.GossipGraD()
    world = GossipWorld(strategy, 16, alike=False)
    rows = torch.stack([world.flat(rank) for rank in range(16)])
    true = ((rows - rows.mean(0)).square().sum() / rows.square().sum()) ** 0.5
    world.round()
    estimates = [strategy.instruments(state)["consensus_distance"] for state in world.states]
    assert sum(estimates) / 16 == pytest.approx(float(true), rel=0.1)


# -- with the engine ----------------------------------------------------------------------------------


def make(kind: str, model: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


@pytest.mark.parametrize(
    ("kind", "names"), [("momentum", ["momentum_buffer"]), ("adam", ["exp_avg", "exp_avg_sq"])]
)
def test_momentum_travels_along(kind: str, names: list[str]) -> None:
    """Two workers that synchronize have the mean of both weights and momenta."""

    def worker(lane: LocalLane) -> tuple[list[Any], list[Any], int]:
        model, _ = model_and_optimizer()
        optimizer, strategy = make(kind, model), tw.GossipGraD(exchange="weights+momentum")
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=256) as link:
            for step in range(5):
                step_once(model, optimizer, step, link.rank)
            link.synchronize()
            sent = link.stats.sent_bytes
        kept = [optimizer.state[p][name].clone() for p in model.parameters() for name in names]
        return [p.detach().clone() for p in model.parameters()], kept, sent

    (weights, kept, sent), (others, other_kept, _) = run_threads(2, worker)
    for ours, theirs in zip(weights + kept, others + other_kept, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    assert sent >= 5 * 8 * 289 * (1 + len(names))
    for each in kept:
        assert each.isfinite().all()
        assert each.abs().max() > 0


def test_an_optimizer_without_momentum_is_refused_by_name() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(SettingError, match=r"GossipGraD\.exchange must be 'weights' with") as caught:
        tw.attach(model, make("plain", model), tw.GossipGraD(exchange="weights+momentum"))
    assert "AdamW" in caught.value.hint


def test_the_average_brings_all_together_and_is_the_next_reference() -> None:
    strategy = tw.GossipGraD(payload="int8", average_every=3)

    def worker(lane: LocalLane) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=256) as link:
            for step in range(3):
                step_once(model, optimizer, step, link.rank)
            references = link.state_dict()["leaves"]["reference"]
            return {name: p.detach().clone() for name, p in model.named_parameters()}, references

    outcomes = run_threads(5, worker)
    for weights, references in outcomes:
        assert weights.keys() == references.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, outcomes[0][0][name])
            assert torch.equal(weight, references[name])


@pytest.mark.parametrize(
    "strategy", [tw.GossipGraD(payload="int8", share=0.5), tw.GossipGraD(share="auto")], ids=repr
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
    link = tw.attach(model, optimizer, tw.GossipGraD())
    with pytest.raises(UsageError, match="has no join"), link.join():
        pass
    link.detach()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topology": "ring"}, "GossipGraD.topology must be one of 'dissemination', 'hypercube', got 'ring'"),
        ({"exchange": "gradients"}, "GossipGraD.exchange must be one of 'weights', 'weights.momentum', got"),
        ({"payload": "fp8"}, "GossipGraD.payload must be one of 'fp32', 'bf16', 'int8', got 'fp8'"),
        ({"share": 0.0}, "GossipGraD.share must be a number above 0 and at most 1, or 'auto', got 0.0"),
        ({"share": 1.5}, "GossipGraD.share must be a number above 0 and at most 1, or 'auto', got 1.5"),
        ({"average_every": -1}, "GossipGraD.average_every must be 0 or more steps, got -1"),
    ],
)
def test_wrong_settings_name_field_rule_and_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        tw.GossipGraD(**settings)


def test_a_hypercube_needs_a_power_of_two() -> None:
    with pytest.raises(SettingError, match="topology must be 'dissemination' with 3 workers"):
        GossipWorld(tw.GossipGraD(topology="hypercube"), 3)


def test_a_share_says_what_it_cost_before_training_starts() -> None:
    said = tw.GossipGraD(share="auto").advice(None, 16)
    assert "a tenth of it cost 5.2 points of accuracy with 16 workers (cifar-resnet20, 30 epochs)" in said
    assert "all of it 1.0" in said
    assert "cost 0.5 points of accuracy with 4 workers" in tw.GossipGraD(share=0.1).advice(5000, 4)
    assert "a tenth in 92 steps 3.2 (digits-wide)" in tw.GossipGraD(share=0.1).advice(5000, 4)
    assert tw.GossipGraD().advice(5000, 4) == ""
