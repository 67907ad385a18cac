"""Which rows and columns of which tensors belong to one neuron.

A unit is a number given to every output of every layer. Operations that add, multiply or compare two outputs
make them one unit (union-find); what is left is a neuron: it is removed everywhere, or nowhere. Neurons that
lie in the same tensors form a group: a layer, or several layers that a residual sum ties together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Role = Literal["in", "out", "along"]
"""A row of incoming weights, a column of outgoing weights, or a number of its own (a bias, batch norm)."""
Place = tuple[str, int]
"""Name of a parameter or buffer, and one of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A layer that reads the neurons of a group, by its outgoing weights."""

    module: str
    weight: str
    bias: str | None
    """The parameter that a constant can be folded into; None: the layer has none."""
    norm: str | None = None
    """Without a bias: the batch norm that directly follows, whose running mean takes a constant."""
    padded: bool = False
    """Whether it pads with zeros, so that a constant cannot be folded into a bias."""

    @property
    def takes_constants(self) -> bool:
        return not self.padded and (self.bias is not None or self.norm is not None)


@dataclass(slots=True, kw_only=True)
class Group:
    """Neurons that lie in the same tensors."""

    name: str
    """The layer that computes them."""
    size: int
    places: dict[Place, Tensor]
    """Their places: for each neuron (rows) its indices along that dimension, several behind a flatten."""
    roles: dict[Place, set[Role]]
    consumers: list[Consumer]
    operations: frozenset[str]
    """Operations on them between the layer and its consumers."""
    biases: dict[str, str]
    """Biases of the layers that compute them: by the weight of that layer."""
    norms: dict[str, str]
    """Batch norms that directly follow a layer that computes them: by the weight of that layer."""
    frozen: str = ""
    """Why none of them can be removed; empty: they can."""
    share: float = 1.0
    """Part of a whole group that this one is."""
    least: int = 1
    """Neurons that stay, whatever the others make up for."""

    def columns(self, consumer: Consumer) -> Tensor:
        """The columns of a consumer's weight that each neuron has."""
        return self.places[consumer.weight, 1]

    def pick(self, neurons: Tensor) -> Group:
        """The same group with fewer neurons."""
        places = {place: indices[neurons] for place, indices in self.places.items()}
        return replace(self, size=len(neurons), places=places)

    def down_to_multiple(self, count: int, multiple: int) -> int:
        """How many of `count` neurons may go so that a multiple of `multiple` stays."""
        return max(0, count - (count - self.size) % multiple)

    def parts(self, most: int, multiple: int = 1) -> list[Group]:
        """The group in parts of at most about `most` neurons, each from everywhere. If the size is a multiple
        of `multiple`, those of the parts are too, and so is what they leave together."""
        if self.frozen or self.size <= most:
            return [self]
        count = -(-self.size // most)
        part_of = torch.arange(self.size) // multiple % count
        picks = [self.pick((part_of == number).nonzero().flatten()) for number in range(count)]
        return [replace(pick, share=pick.size / self.size) for pick in picks]


@dataclass(slots=True)
class Units:
    """The units of one model, while its operations are followed."""

    parent: list[int] = field(default_factory=lambda: [0])
    places: dict[Place, Tensor] = field(default_factory=dict)
    """The unit at each index of a dimension; 0: none."""
    roles: dict[Place, set[Role]] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    """Consumers by the name of their weight."""
    norms: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    """Modules by the name of the weight that computes units."""
    _frozen: dict[int, str] = field(default_factory=dict)
    _operations: list[tuple[str, Tensor]] = field(default_factory=list)

    def fresh(self, count: int) -> Tensor:
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def find(self, unit: int) -> int:
        while self.parent[unit] != unit:
            self.parent[unit] = self.parent[self.parent[unit]]
            unit = self.parent[unit]
        return unit

    def unite(self, ours: Tensor, theirs: Tensor) -> None:
        """Make units one, pair by pair; 0 stands for no unit."""
        pairs = torch.stack([ours.flatten(), theirs.flatten()]).unique(dim=1)
        for a, b in pairs.T.tolist():
            if a and b and (x := self.find(a)) != (y := self.find(b)):
                self.parent[max(x, y)] = min(x, y)

    def freeze(self, units: Tensor, reason: str) -> None:
        for unit in units.unique().tolist():
            if unit:
                self._frozen.setdefault(unit, reason)

    def lie(self, place: Place, units: Tensor, role: Role) -> None:
        """These units lie along this dimension; with those that lie there already they are one."""
        self.roles.setdefault(place, set()).add(role)
        if place in self.places:
            before = self.places[place]
            self.unite(before, units)
            mixed = (before == 0) != (units == 0)
            self.freeze(torch.where(mixed, before + units, 0), f"{place[0]} is shared with other data")
        self.places[place] = units.clone()

    def happens(self, operation: str, units: Tensor) -> None:
        self._operations.append((operation, units.unique()))

    def freeze_tensor(self, name: str, reason: str) -> None:
        for place, units in self.places.items():
            if place[0] == name:
                self.freeze(units, reason)

    def groups(self) -> list[Group]:
        """All neurons by where they lie, in the order in which layers compute them."""
        roots = self._roots()
        reasons = ["", *dict.fromkeys(self._frozen.values())]
        frozen = torch.zeros(len(roots), dtype=torch.long)
        for unit, reason in reversed(self._frozen.items()):  # what was said first holds
            frozen[roots[unit]] = reasons.index(reason)
        spots = {place: roots[units] for place, units in self.places.items()}
        counts = [torch.bincount(found, minlength=len(roots)) for found in spots.values()]
        counts = [count.index_fill(0, torch.tensor([0]), 0) for count in counts]  # 0 is no unit
        if not counts:
            return []
        where = torch.stack([*counts, frozen])
        members = where[:-1].any(0).nonzero().flatten()
        kind_of = torch.zeros_like(members)
        for row in where[:, members]:  # faster than unique(dim=1)
            kind_of = (kind_of * (int(row.max()) + 1) + row).unique(return_inverse=True)[1]
        alike = [members[kind_of == kind] for kind in kind_of.unique().tolist()]
        operations = [(name, roots[units]) for name, units in self._operations]
        return [
            self._group(units, spots, where[:-1, units[0]].tolist(), operations, reasons[frozen[units[0]]])
            for units in sorted(alike, key=lambda units: int(units[0]))
        ]

    def _roots(self) -> Tensor:
        """The unit that each unit has become one with."""
        parent = torch.tensor(self.parent)
        while not torch.equal(above := parent[parent], parent):
            parent = above
        return parent

    def _bias(self, weight: str) -> str | None:
        return self.consumers[weight].bias if weight in self.consumers else None

    def _group(
        self,
        members: Tensor,
        spots: dict[Place, Tensor],
        counts: Sequence[int],
        operations: Sequence[tuple[str, Tensor]],
        reason: str,
    ) -> Group:
        """Units that lie in the same tensors, each so many times along each of the places."""
        places = {}
        inside = torch.zeros(len(self.parent), dtype=torch.bool).index_fill_(0, members, True)
        for (place, found), count in zip(spots.items(), counts, strict=True):
            if count:
                indices = inside[found].nonzero().flatten()
                places[place] = indices[found[indices].sort(stable=True).indices].view(-1, count)
        weights = [name for name, dim in places if "in" in self.roles[name, dim] and name in self.layers]
        readers = [self.consumers[name] for name, dim in places if "out" in self.roles[name, dim]]
        return Group(
            name=self.layers[weights[0]] if weights else next(iter(places))[0],
            size=len(members),
            places=places,
            roles={place: self.roles[place] for place in places},
            consumers=readers,
            operations=frozenset(name for name, units in operations if inside[units].any()),
            biases={name: bias for name in weights if (bias := self._bias(name))},
            norms={name: self.norms[name] for name in weights if name in self.norms},
            frozen=reason or ("" if readers else "nothing that is known reads it"),
        )
