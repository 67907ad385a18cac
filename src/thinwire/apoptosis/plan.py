"""What goes at one event: found by one worker, and told to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.apoptosis.criteria import find_exact
from thinwire.apoptosis.elimination import eliminate
from thinwire.apoptosis.moments import Moments, Table
from thinwire.apoptosis.surgery import Fold, Kept, Removal
from thinwire.apoptosis.units import Group, Place

MOST_WEIGHED = 384
"""Neurons that are weighed against each other; of a wider layer, others at every event. The time grows with
the cube, and so many make up for each other nearly as well as all."""
MOST_AT_ONCE = 0.5
"""Of a layer. A young network does little, so that few neurons make up for all others; what went cannot come
back later, when more of them are needed."""
LEFT_OF_PART = 0.125
"""Of the neurons that are weighed so many stay at least: they make up for the others."""


def find_removals(
    model: nn.Module, groups: Sequence[Group], table: Table, *, budget: float, min_width: int
) -> list[Removal]:
    """For every group what goes: by least squares on data where what consumers read was measured, else by
    exact rules alone."""
    found = []
    for number, group in enumerate(groups):
        if group.frozen or group.size + group.others <= min_width:
            continue
        moments = {
            each.weight: table[number, each.weight]
            for each in group.consumers
            if (number, each.weight) in table
        }
        whole = group.size + group.others
        most = min(int(MOST_AT_ONCE * whole), whole - min_width, int((1 - LEFT_OF_PART) * group.size))
        removal = _remove(model, group, moments, budget, group.size - most)
        if removal is not None and len(removal.dropped):
            found.append(removal)
    return found


def _remove(
    model: nn.Module, group: Group, moments: dict[str, Moments], budget: float, min_width: int
) -> Removal | None:
    if len(moments) == len(group.consumers):
        removal = eliminate(model, group, moments, budget=budget, min_width=min_width)
        if removal is not None:
            return removal
    return find_exact(model, group).removal(min_width)


def shrink_groups(groups: Sequence[Group], kept: Kept) -> list[Group]:
    """The same groups after the cut: fewer neurons, at other indices. A new trace would find them too, but
    takes as long as deciding what goes."""

    def left(place: Place) -> Tensor | None:
        return kept[place[0]][place[1]] if place[0] in kept else None

    found = []
    for group in groups:
        first, indices = next(iter(group.places.items()))
        stays = torch.ones(group.size, dtype=torch.bool)
        if (there := left(first)) is not None:
            stays = torch.isin(indices[:, 0], there)
        smaller = group.pick(stays.nonzero().flatten())
        for place, indices in smaller.places.items():
            if (there := left(place)) is not None:
                smaller.places[place] = torch.searchsorted(there, indices)
        found.append(smaller)
    return found


def encode(groups: Sequence[Group], removals: Sequence[Removal]) -> tuple[list[Any], list[Tensor]]:
    """Removals as JSON, and the numbers of their folds in order."""
    described = []
    for removal in removals:
        at = next(i for i, group in enumerate(groups) if group is removal.group)
        described.append(
            {
                "group": at,
                "name": removal.group.name,
                "kept": removal.kept.tolist(),
                "folds": list(removal.folds),
                "causes": removal.causes,
                "change": removal.change,
            }
        )
    return described, _numbers(removals)


def decode(
    groups: Sequence[Group], described: Sequence[dict[str, Any]]
) -> tuple[list[Removal], list[Tensor]]:
    """The same removals, with tensors for the numbers that are still to come."""
    removals = []
    for each in described:
        group = groups[each["group"]]
        assert group.name == each["name"], "all workers have found the same groups"
        kept = torch.tensor(each["kept"], dtype=torch.long)
        gone = group.size - len(kept)
        folds = {
            weight: Fold(
                coefficients=torch.zeros(gone, len(kept), dtype=torch.float64),
                constants=torch.zeros(gone, dtype=torch.float64),
            )
            for weight in each["folds"]
        }
        removals.append(
            Removal(group=group, kept=kept, folds=folds, causes=each["causes"], change=each["change"])
        )
    return removals, _numbers(removals)


def _numbers(removals: Sequence[Removal]) -> list[Tensor]:
    folds = [fold for removal in removals for fold in removal.folds.values()]
    return [numbers for fold in folds for numbers in (fold.coefficients, fold.constants)]
