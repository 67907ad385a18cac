"""Neurons that can go without a change of the output, found in the weights alone.

For a neuron with incoming weights and bias u, activation f and outgoing weights a, drop j where

    any f            u_j = u_i                        a_i += a_j
    ReLU, linear     u_j = c u_i, c > 0               a_i += c a_j         (f(c z) = c f(z))
    tanh             u_j = -u_i                       a_i -= a_j           (f(-z) = -f(z))
    sigmoid          u_j = -u_i                       a_i -= a_j, next bias += a_j
    any f            a_j = 0                          nothing
    any f            weights of u_j are 0             next bias += a_j f(b_j)

Where u_j differs from c u_i by d, the output of the next layer changes by at most |a_j| L |d| |(x, 1)|, L the
Lipschitz constant of f (1; sigmoid 1/4). These rules follow from the activation functions; they are ours, not
the paper's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.apoptosis.operations import EVEN_SUM, HOMOGENEOUS, LINEAR, ODD
from thinwire.apoptosis.surgery import Fold, Removal, named_tensors
from thinwire.apoptosis.units import Group

ROUNDING = 64.0
"""Differences up to this many roundings count as none."""


@dataclass(slots=True)
class Merges:
    """Neurons of one group that go, each into at most one other."""

    group: Group
    into: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """By neuron that goes: one that stays, c and constant in h_j = c h_i + constant; -1: into none."""
    causes: dict[int, str] = field(default_factory=dict)
    distances: dict[int, float] = field(default_factory=dict)
    """|u_j - c u_i| for those that were merged."""

    def removal(self, min_width: int = 1, multiple: int = 1) -> Removal:
        """The same as a removal that leaves at least `min_width` neurons, and a multiple of `multiple`."""
        group = self.group
        most = min(len(self.into), group.size - min_width)
        going = sorted(self.into)[: group.down_to_multiple(most, multiple)]
        gone = torch.ones(group.size, dtype=torch.bool)
        gone[going] = False
        kept = gone.nonzero().flatten()
        place = {int(neuron): at for at, neuron in enumerate(kept)}
        coefficients = torch.zeros(len(going), len(kept), dtype=torch.float64)
        constants = torch.zeros(len(going), dtype=torch.float64)
        for row, neuron in enumerate(going):
            target, factor, constant = self.into[neuron]
            if target >= 0:
                coefficients[row, place[target]] = factor
            constants[row] = constant
        causes = Counter(self.causes[neuron] for neuron in going)
        folds = {
            each.weight: Fold(coefficients=coefficients, constants=constants) for each in group.consumers
        }
        return Removal(group=group, kept=kept, folds=folds, causes=causes)


def incoming(tensors: dict[str, Tensor], group: Group) -> Tensor:
    """All that decides what a neuron computes, a row for each: equal rows compute the same."""
    rows = [
        _rows(tensors[name], dim, group.places[name, dim])
        for (name, dim), roles in group.roles.items()
        if roles & {"in", "along"}
    ]
    return torch.cat(rows, dim=1)


def effective(model: nn.Module, tensors: dict[str, Tensor], group: Group) -> Tensor | None:
    """Incoming weights and biases with batch norm multiplied in, as it is in evaluation; None if something
    else is computed with them."""
    rows, seen = [], set()
    for (name, dim), roles in group.roles.items():
        if "in" not in roles:
            continue
        weights, indices = _rows(tensors[name], dim, group.places[name, dim]), group.places[name, dim]
        bias = weights.new_zeros(len(weights), indices.shape[1])
        if (key := group.biases.get(name)) is not None:
            bias = tensors[key].detach()[indices]
            seen.add(key)
        if (norm := group.norms.get(name)) is not None:
            scale, shift = _affine(model.get_submodule(norm))
            weights = weights * scale[indices[:, 0]][:, None]
            bias = bias * scale[indices] + shift[indices]
            seen |= {f"{norm}.{key}" for key in ("weight", "bias", "running_mean", "running_var")}
        rows += [weights, bias]
    others = {name for (name, _), roles in group.roles.items() if "along" in roles} - seen
    return None if others or not rows else torch.cat(rows, dim=1)


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Batch norm in evaluation: x * scale + shift."""
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    return scale, shift + norm.bias.detach() if norm.affine else shift


def _rows(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    return tensor.detach().movedim(dim, 0)[indices].flatten(1)


def outgoing_norms(tensors: dict[str, Tensor], group: Group) -> Tensor:
    """The norm of each neuron's outgoing weights, over all consumers."""
    squares = [
        tensors[each.weight].detach().movedim(1, 0)[group.columns(each)].flatten(1).double().square().sum(1)
        for each in group.consumers
    ]
    return torch.stack(squares).sum(0).sqrt().cpu()


def row_norms(tensors: dict[str, Tensor], group: Group) -> Tensor:
    """The norm of each neuron's incoming weights."""
    squares = [
        _rows(tensors[name], dim, group.places[name, dim]).float().square().sum(1)
        for (name, dim), roles in group.roles.items()
        if "in" in roles
    ]
    return torch.stack(squares).sum(0).sqrt()


def find_exact(model: nn.Module, group: Group, tolerance: float | None = None) -> Merges:
    """Neurons without effect, and duplicates; `tolerance`: how far rows may differ relative to their size,
    by default only by rounding."""
    tensors, merges = named_tensors(model), Merges(group)
    rows = incoming(tensors, group)
    if tolerance is None:
        tolerance = ROUNDING * torch.finfo(rows.dtype).eps
    silent = outgoing_norms(tensors, group) == 0
    for neuron in silent.nonzero().flatten().tolist():
        merges.into[neuron] = (-1, 0.0, 0.0)
        merges.causes[neuron] = "no effect"
    _merge(merges, rows, "equal", tolerance)
    if (scaled := effective(model, tensors, group)) is None:
        return merges
    constants = all(each.takes_constants for each in group.consumers)
    negates = group.operations & {"scale", "neg", "__neg__", "pad"}
    if group.operations <= HOMOGENEOUS:
        _merge(merges, scaled, "scaled", tolerance)
    if group.operations <= ODD:
        _merge(merges, scaled, "mirrored", tolerance)
    # between one sigmoid and the next layer the rest must keep 1 as 1
    elif group.operations <= EVEN_SUM and group.operations - LINEAR and constants and not negates:
        _merge(merges, scaled, "complement", tolerance)
    return merges


def add_constants(model: nn.Module, merges: Merges, values: dict[str, Tensor]) -> None:
    """Neurons whose incoming weights are all zero give one number; `values` has it, by the weight of each
    consumer, as consumers have seen it."""
    tensors, group = named_tensors(model), merges.group
    weights = [
        _rows(tensors[name], dim, group.places[name, dim]).cpu()
        for (name, dim), roles in group.roles.items()
        if "in" in roles
    ]
    constant = ~torch.cat(weights, dim=1).any(dim=1)
    for neuron in constant.nonzero().flatten().tolist():
        seen = {float(values[each.weight][neuron]) for each in group.consumers}
        taken = all(each.takes_constants for each in group.consumers) and "pad" not in group.operations
        if neuron not in merges.into and len(seen) == 1 and (taken or seen == {0.0}):
            merges.into[neuron] = (-1, 0.0, seen.pop())
            merges.causes[neuron] = "constant"


def _merge(merges: Merges, rows: Tensor, kind: str, tolerance: float) -> None:
    """Merge rows that are multiples of another; the factor is 1, positive or -1 by `kind`."""
    rows = rows.cpu()
    norms = rows.norm(dim=1)
    unit = rows / norms.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
    targets = {target for target, _, _ in merges.into.values()}
    sign = -1.0 if kind in ("mirrored", "complement") else 1.0
    # 1 - cosine is half the squared distance of unit vectors, and cannot be seen below one rounding
    unlike = max(tolerance**2, ROUNDING * torch.finfo(rows.dtype).eps)
    near = _with_twins(unit, sign, tolerance)
    close = unit[near] @ unit[near].T * sign >= 1.0 - unlike
    close.fill_diagonal_(False)
    twins = {int(near[at]): near[close[at]].tolist() for at in close.any(1).nonzero().flatten().tolist()}
    for neuron in norms.argsort(descending=True, stable=True).tolist() if twins else ():
        if neuron in merges.into:
            continue
        for other in twins.get(neuron, ()):
            if other in merges.into or other in targets:
                continue
            factor = sign * (float(norms[other] / norms[neuron]) if kind == "scaled" else 1.0)
            distance = float((rows[other] - factor * rows[neuron]).norm())
            if distance <= tolerance * float(norms[other]):
                constant = 1.0 if kind == "complement" else 0.0
                merges.into[other] = (neuron, factor, constant)
                merges.distances[other] = distance
                merges.causes[other] = "duplicate" if kind == "equal" else f"{kind} duplicate"
                targets.add(neuron)


def _with_twins(unit: Tensor, sign: float, tolerance: float) -> Tensor:
    """Rows that may be `sign` times another one; hardly any others.

    Rows are compared along a random direction first: differences there are no larger than the whole.
    """
    generator = torch.Generator().manual_seed(0)
    line = torch.randn(unit.shape[1], generator=generator, dtype=unit.dtype)
    seen, places = (unit @ (line / line.norm())).sort()
    reach = 4.0 * tolerance  # rows of other lengths, and projections are rounded
    low = torch.searchsorted(seen, sign * seen - reach)
    high = torch.searchsorted(seen, sign * seen + reach, right=True)
    itself = 1 if sign > 0 else 0
    near: Tensor = places[high - low > itself].sort().values
    return near


def bounds(model: nn.Module, merges: Merges, input_norm: float) -> dict[int, float]:
    """By neuron that was merged: how much the next layers' outputs can change, for inputs of this norm."""
    norms = outgoing_norms(named_tensors(model), merges.group)
    steepness = 0.25 if "sigmoid" in merges.group.operations else 1.0
    length = (1.0 + input_norm**2) ** 0.5
    return {j: float(norms[j]) * steepness * d * length for j, d in merges.distances.items()}
