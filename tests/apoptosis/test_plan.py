"""What goes at one event, and where neurons lie after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.apoptosis.networks import KINDS, make
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.moments import measure
from thinwire.apoptosis.plan import MOST_AT_ONCE, MOST_WEIGHED, find_removals, shrink_groups
from thinwire.apoptosis.proof import prove
from thinwire.apoptosis.surgery import Removal, cut, fold, kept_indices
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


def test_of_a_wide_layer_others_are_weighed_at_every_event() -> None:
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
    halves = [whole[0].part(MOST_WEIGHED, turn) for turn in range(2)]
    assert [(half.size, half.others) for half in halves] == 2 * [(width // 2, width // 2)]
    first_rows = torch.cat([half.places["0.weight", 0] for half in halves]).flatten()
    assert sorted(first_rows.tolist()) == list(range(width))
    parts = [group.part(MOST_WEIGHED, 0) for group in whole]
    removals = find_removals(model, parts, measure(model, parts, [call]), budget=budget, min_width=4)
    assert all(removal.change <= budget for removal in removals)
    with torch.no_grad():
        expected = model(test)
    for removal in removals:
        fold(model, removal)
    kept = kept_indices(model, removals)
    cut(model, (), kept)
    assert width * MOST_AT_ONCE <= first.out_features < width
    assert shrink_groups(whole, kept)[0].size == first.out_features
    with torch.no_grad():
        change = float((model(test) - expected).norm() / (expected - expected.mean(0)).norm())
    assert change <= 2.0 * budget  # other data than that it was fitted to
