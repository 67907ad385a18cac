"""The removals of one event: found by one worker, and told to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.apoptosis.criteria import find_exact
from thinwire.apoptosis.elimination import eliminate
from thinwire.apoptosis.moments import Table
from thinwire.apoptosis.surgery import Fold, Kept, Removal
from thinwire.apoptosis.units import Group, Place

MOST_WEIGHED = 384
"""Neurons that are weighed against each other; a wider layer is weighed in parts. The time grows with
the cube, and this many make up for each other nearly as well as all."""
MOST_AT_ONCE = 0.75
"""Largest part of a layer that one event removes. A young network does little, so that few neurons make up
for all others; those that went cannot come back later, when more are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one event's removals."""

    budget: float
    """Relative change of what a consumer computes, root mean square."""
    min_width: int = 1
    """Neurons that every layer keeps."""
    multiple: int = 1
    """Divisor of every width that is left."""

    def most(self, group: Group) -> int:
        """How many neurons of a group, or of a part of one, may go."""
        stay = math.ceil(max(self.min_width, group.least) * group.share)
        return min(int(MOST_AT_ONCE * group.size), group.size - stay)

    def budget_of(self, group: Group) -> float:
        """Budget of a group, or of a part of one: errors of several parts add up as independent ones do."""
        return self.budget * math.sqrt(group.share)


def find_removals(model: nn.Module, groups: Sequence[Group], table: Table, limits: Limits) -> list[Removal]:
    """The removals, by group: by least squares where the inputs of all consumers were measured, else by exact
    rules alone."""
    found = []
    for number, group in enumerate(groups):
        if group.frozen or (most := limits.most(group)) <= 0:
            continue
        moments = {
            each.weight: table[number, each.weight]
            for each in group.consumers
            if (number, each.weight) in table
        }
        removal, shape = None, {"min_width": group.size - most, "multiple": limits.multiple}
        if len(moments) == len(group.consumers):
            removal = eliminate(model, group, moments, budget=limits.budget_of(group), **shape)
        if removal is None:
            removal = find_exact(model, group).removal(**shape)
        if len(removal.dropped):
            found.append(removal)
    return found


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
