"""Which numbers are applied, and who keeps the others: against plain dictionaries."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.strategies.sparse.world import World, random_gradients
from thinwire.strategies.gtopk import hops
from thinwire.strategies.sparse.base import SparseStrategy

NUMEL, DENSITY = 200, 0.06
K = 12
Entries = dict[int, float]


def largest(entries: Entries, k: int = K) -> Entries:
    """Those of largest magnitude; of equal ones those of lower index."""
    order = sorted(entries, key=lambda i: (-abs(entries[i]), i))[:k]
    return {i: entries[i] for i in order}


def added(a: Entries, b: Entries) -> Entries:
    return {i: a.get(i, 0.0) + b.get(i, 0.0) for i in a.keys() | b.keys()}


def global_top_k(own: list[Entries], kept: list[Entries]) -> Entries:
    """What GTopK's documentation says; what merges drop is added to `kept`."""
    core = 1 << (len(own).bit_length() - 1)
    blocks = []
    for rank in range(core):
        merged = largest(own[rank])
        if rank + core < len(own):
            merged = drop(added(merged, largest(own[rank + core])), [rank], kept)
        blocks.append(merged)
    size = 1
    while len(blocks) > 1:
        size *= 2
        blocks = [
            drop(added(*blocks[2 * i : 2 * i + 2]), list(range(size * i, size * i + size)), kept)
            for i in range(len(blocks) // 2)
        ]
    return blocks[0]


def drop(entries: Entries, block: list[int], kept: list[Entries]) -> Entries:
    """Cut to the largest; each of the others goes to one worker of the block."""
    rest = largest(entries)
    for index in entries.keys() - rest.keys():
        taker = kept[block[index % len(block)]]
        taker[index] = taker.get(index, 0.0) + entries[index]
    return rest


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 13])
def test_gtopk_applies_what_its_documentation_says(world_size: int, complete: bool) -> None:
    strategy = tw.GTopK(density=DENSITY, exact=True, complete=complete)
    world = World(strategy, world_size, [(NUMEL, 0)])
    kept: list[Entries] = [{} for _ in range(world_size)]
    before: Entries = {}
    for step in range(3):  # in the next one everything is sent
        gradients = random_gradients(world_size, [(NUMEL, 0)], seed=step)
        [applied] = world.step(gradients)[0]
        held = {i: sum(each.pop(i, 0.0) for each in kept) for i in (before if complete else ())}
        own = [added(k, dict(enumerate(g[0].tolist()))) for k, g in zip(kept, gradients, strict=True)]
        kept = [{i: v for i, v in each.items() if i not in largest(each)} for each in own]
        before = global_top_k(own, kept)
        assert len(before) == K
        expected = {i: value for i, value in added(before, held).items() if value}
        assert set(applied.nonzero().view(-1).tolist()) == expected.keys()
        for index, value in expected.items():
            assert applied[index].item() == pytest.approx(value / world_size, rel=1e-9)
        for state, left in zip(world.states, kept, strict=True):
            theirs = torch.tensor([left.get(i, 0.0) for i in range(NUMEL)], dtype=torch.float64)
            torch.testing.assert_close(state.residuals[0], theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("complete", [True, False])
def test_an_index_dropped_in_one_branch_and_kept_in_another_is_not_lost(complete: bool) -> None:
    world = World(tw.GTopK(density=0.02, exact=True, complete=complete), 4, [(NUMEL, 0)])
    gradients = [[torch.zeros(NUMEL, dtype=torch.float64)] for _ in range(4)]
    for rank, (index, value) in enumerate([(7, 1.0), (50, 9.0), (7, 8.0), (60, 0.1)]):
        gradients[rank][0][index] = value
        gradients[rank][0][100 + 10 * rank : 100 + 10 * rank + 3] = 2.0 if rank < 2 else 0.5
    [applied] = world.step(gradients)[0]
    assert applied[7] == 8.0 / 4  # worker 0's part was dropped when it met worker 1
    assert world.residual(0)[7] == 1.0
    for own in gradients:
        own[0].zero_()
    [applied] = world.step(gradients)[0]
    assert applied[7] == (1.0 / 4 if complete else 0.0)  # others are larger than that


def test_gtopk_applies_what_nobody_but_one_found_large() -> None:
    """Workers seldom agree on what is large, and what is kept is applied with all that they hold of it."""
    left = {}
    for complete in (True, False):
        world = World(tw.GTopK(density=0.01, complete=complete), 8, [(2000, 0)])
        for step in range(60):
            generator = torch.Generator().manual_seed(step)
            world.step([[torch.randn(2000, generator=generator, dtype=torch.float64)] for _ in range(8)])
        left[complete] = sum(float(state.residuals[0].square().sum()) for state in world.states)
    assert left[True] < 0.8 * left[False]


def test_topk_applies_what_everyone_selected() -> None:
    world = World(tw.TopK(density=DENSITY, exact=True), 3, [(NUMEL, 0)])
    gradients = random_gradients(3, [(NUMEL, 0)], seed=5)
    [applied] = world.step(gradients)[0]
    expected: Entries = {}
    for each in gradients:
        expected = added(expected, largest(dict(enumerate(each[0].tolist()))))
    assert set(applied.nonzero().view(-1).tolist()) == expected.keys()


def test_oktopk_applies_the_largest_sums_of_every_region() -> None:
    world = World(tw.OkTopK(density=0.32, exact=True), 4, [(NUMEL, 0)])
    gradients = random_gradients(4, [(NUMEL, 0)], seed=6)
    [applied] = world.step(gradients)[0]
    capacity = 64  # 0.32 of 200, which is 16 for each owner; 24 from each worker to each owner
    sums: Entries = {}
    for each in gradients:
        sent = largest(dict(enumerate(each[0].tolist())), capacity)
        for region in range(4):
            inside = {i: v for i, v in sorted(sent.items()) if 50 * region <= i < 50 * region + 50}
            sums = added(sums, dict(list(inside.items())[:24]))
    expected: Entries = {}
    for region in range(4):
        inside = {i: v for i, v in sums.items() if 50 * region <= i < 50 * region + 50}
        expected |= largest(inside, 16)
    assert set(applied.nonzero().view(-1).tolist()) == expected.keys()
    for index, value in expected.items():
        assert applied[index].item() == pytest.approx(value / 4, rel=1e-12)


@pytest.mark.parametrize("world_size", [*range(1, 20), 33, 64])
def test_every_hop_has_its_other_end(world_size: int) -> None:
    everyones = [list(hops(rank, world_size)) for rank in range(world_size)]
    for rank, own in enumerate(everyones):
        for hop in own:
            assert hop.peer != rank
            [other] = [
                each for each in everyones[hop.peer] if each.number == hop.number and each.peer == rank
            ]
            assert (other.sends, other.receives) == (hop.receives, hop.sends)


@pytest.mark.parametrize("strategy", [tw.TopK(), tw.GTopK(), tw.OkTopK()], ids=repr)
def test_regions_and_capacity_survive_a_world_of_many(strategy: SparseStrategy) -> None:
    """More owners than entries: messages still fit together."""
    world = World(strategy, 9, [(40, 1)])
    for step in range(20):
        results = world.step(random_gradients(9, [(40, 1)], step))
        assert all(torch.equal(each[0], results[0][0]) for each in results)
