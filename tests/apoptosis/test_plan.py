"""What goes at one event, and where neurons lie after it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.apoptosis.networks import KINDS, make
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.moments import measure
from thinwire.apoptosis.plan import MOST_AT_ONCE, MOST_WEIGHED, Limits, find_removals, shrink_groups
from thinwire.apoptosis.proof import prove
from thinwire.apoptosis.surgery import Removal, cut, fold, kept_indices, named_tensors
from thinwire.apoptosis.trace import trace


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_groups_after_a_cut_are_those_that_a_new_trace_finds(kind: str) -> None:
    model, batch = make(kind, 6, "relu", 0)
    call = Call((batch,), {})
    groups = trace(model, call)
    for group in groups:
        prove(model, group, call)
    removals = [
        Removal(group=group, kept=torch.tensor([0, 2, *range(4, group.size)]))
        for group in groups
        if not group.frozen
    ]
    kept = kept_indices(model, removals)
    cut(model, (), kept)
    shrunk = {group.name: group for group in shrink_groups(groups, kept)}
    for found in trace(model, call):
        ours = shrunk[found.name]
        assert ours.size == found.size
        assert ours.places.keys() == found.places.keys()
        assert all(torch.equal(ours.places[place], found.places[place]) for place in found.places)
        assert (ours.roles, ours.consumers, ours.operations) == (
            found.roles,
            found.consumers,
            found.operations,
        )


def test_a_wide_layer_is_weighed_in_parts() -> None:
    """A layer with more neurons than are weighed at once, whose outputs are those of a few."""
    width, budget = MOST_WEIGHED + 200, 0.05
    generator = torch.Generator().manual_seed(0)
    first = nn.Linear(6, width)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(width, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        rank = torch.randn(width, 2, generator=generator, dtype=torch.float64)
        first.weight.copy_(rank @ first.weight[:2])
    data, test = (torch.randn(1600, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    call = Call((data,), {})
    whole = trace(model, call)
    halves = whole[0].parts(MOST_WEIGHED)
    assert [(half.size, half.share) for half in halves] == 2 * [(width // 2, 0.5)]
    first_rows = torch.cat([half.places["0.weight", 0] for half in halves]).flatten()
    assert sorted(first_rows.tolist()) == list(range(width))
    parts = [part for group in whole for part in group.parts(MOST_WEIGHED)]
    removals = find_removals(model, parts, measure(model, parts, [call]), Limits(budget=budget, min_width=4))
    assert all(removal.change <= budget for removal in removals)
    with torch.no_grad():
        expected = model(test)
    fold(model, removals)
    kept = kept_indices(model, removals)
    cut(model, (), kept)
    assert first.out_features <= width * (1 - MOST_AT_ONCE) + 2
    assert shrink_groups(whole, kept)[0].size == first.out_features
    with torch.no_grad():
        change = float((model(test) - expected).norm() / (expected - expected.mean(0)).norm())
    assert change <= 2.0 * budget  # other data than that it was fitted to


@pytest.mark.parametrize(("size", "count", "gone"), [(30, 10, 6), (32, 16, 16), (15, 7, 7), (15, 6, 0)])
def test_what_is_left_is_a_multiple(size: int, count: int, gone: int) -> None:
    model, batch = make("mlp", size, "relu", 0)
    group = trace(model, Call((batch,), {}))[0]
    assert group.size == size
    assert group.down_to_multiple(count, 8) == gone
    assert (size - gone) % 8 == 0 or gone == 0


@pytest.mark.parametrize("exact", [True, False])
def test_layers_are_cut_to_multiples(exact: bool) -> None:
    model, batch = make("mlp", 26, "relu", 0)
    groups, call = trace(model, Call((batch,), {})), Call((batch,), {})
    with torch.no_grad():
        for group in groups:
            for each in group.consumers:
                named_tensors(model)[each.weight][:, group.columns(each)[3:10]] = 0.0
    table = {} if exact else measure(model, groups, [call])
    removals = find_removals(model, groups, table, Limits(budget=1e-6, multiple=8))
    assert removals
    assert {len(removal.kept) for removal in removals} == {24}


def test_neurons_stay_for_the_outputs_they_feed() -> None:
    def least(*widths: int) -> list[int]:
        model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
        return [group.least for group in trace(model, Call((torch.randn(4, widths[0]),), {}))][:-1]

    assert least(4, 64, 64, 10) == [1, 20]
    assert least(4, 64, 1) == [2]
    assert least(4, 64, 1000) == [32], "at most half"


@pytest.mark.parametrize(("size", "multiple"), [(424, 8), (1000, 8), (1001, 1), (1023, 8)])
def test_parts_of_a_wide_layer_are_multiples_as_it_is(size: int, multiple: int) -> None:
    model = nn.Sequential(nn.Linear(8, size), nn.ReLU(), nn.Linear(size, 3))
    (group,) = [group for group in trace(model, Call((torch.randn(2, 8),), {})) if not group.frozen]
    found = group.parts(MOST_WEIGHED, multiple)
    assert sum(part.size for part in found) == size
    assert sum(part.size % multiple != 0 for part in found) <= (size % multiple != 0)
    assert max(part.size for part in found) < MOST_WEIGHED + multiple
    rows = torch.cat([part.places["0.weight", 0].flatten() for part in found])
    assert rows.sort().values.equal(torch.arange(size))
