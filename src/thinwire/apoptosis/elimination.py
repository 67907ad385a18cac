"""Which neurons the others can make up for, and how: least squares on recent data.

A neuron that goes is replaced by the best linear combination of those that stay,
h_j = sum c_ji h_i + constant, folded into the outgoing weights. With S = E[h h^T] the squared error of the
consumer's output is |a_j|^2 / (S^-1)_jj, and the errors of several eliminations, one after another, add up
(optimal brain surgeon, Hassibi & Stork 1992, by layer). Dead, constant and duplicate neurons, and those with
small outgoing weights, are the cheapest; what all of them may cost together is the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.apoptosis.moments import Moments
from thinwire.apoptosis.surgery import Fold, Removal, named_tensors
from thinwire.apoptosis.units import Group

RIDGE = 1e-6
"""Relative to the mean square of the neurons: so much smaller differences count as none."""
BLOCK = 64
"""Neurons that are weighed against each other before the rest is brought up to date."""


@dataclass(slots=True)
class _Consumer:
    """One consumer's view: the inverse of S, and B = a^T a over its outputs."""

    inverse: Tensor
    gram: Tensor
    variance: float
    rows: float

    def costs(self, width: int) -> Tensor:
        """The relative squared error of the output if each neuron went now."""
        count = len(self.gram)
        free = self.inverse.diagonal()[:count].clamp_min(1e-300)
        return self.gram.diagonal() / free / self.variance * self._optimism(width)

    def _optimism(self, width: int) -> float:
        """Least squares fits the noise of its samples too: on others its error is larger."""
        left = self.rows - width
        return (self.rows / left) ** 2 if left > 0 else float("inf")

    def eliminate_(self, gone: Tensor, block: Tensor) -> None:
        """Bring everything up to date after neurons have gone."""
        count = len(self.gram)
        columns = self.inverse[:, gone]
        solved = torch.linalg.solve(self.inverse[gone][:, gone], columns.T)
        self.inverse -= columns @ solved
        factors = -solved[:, :count].T  # what of each neuron that goes the others take over
        self.gram += self.gram[:, gone] @ factors.T + factors @ self.gram[gone]
        self.gram += factors @ block @ factors.T


def eliminate(
    model: nn.Module, group: Group, moments: dict[str, Moments], *, budget: float, min_width: int
) -> Removal | None:
    """Neurons that can go at a relative change (root mean square) of at most `budget` in every consumer's
    output; None if there are none."""
    views = {each.weight: _view(model, group, each.weight, moments[each.weight]) for each in group.consumers}
    found = [view for view in views.values() if view is not None]
    if len(found) < len(views) or not found:
        return None
    dead = torch.stack([moments[each.weight].largest for each in group.consumers]).amax(0) == 0
    order, spent = _choose(found, dead, budget**2, min_width)
    if not order:
        return None
    gone = torch.zeros(group.size, dtype=torch.bool)
    gone[order] = True
    kept, dropped = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    folds = {
        each.weight: _solve(moments[each.weight].second, kept, dropped, _takes_constants(group, each.weight))
        for each in group.consumers
    }
    num_dead = int(dead[dropped].sum())
    causes = {"dead": num_dead, "made up for by others": len(dropped) - num_dead}
    causes = {cause: count for cause, count in causes.items() if count}
    return Removal(group=group, kept=kept, folds=folds, causes=causes, change=spent**0.5)


def _takes_constants(group: Group, weight: str) -> bool:
    consumer = next(each for each in group.consumers if each.weight == weight)
    return consumer.takes_constants and "pad" not in group.operations


def _regularised(second: Tensor, constants: bool) -> Tensor:
    matrix = second.clone() if constants else second[:-1, :-1].clone()
    count = len(second) - 1
    ridge = RIDGE * float(second.diagonal()[:-1].mean()) + 1e-30
    matrix.diagonal()[:count] += ridge
    return matrix


def _view(model: nn.Module, group: Group, weight: str, moments: Moments) -> _Consumer | None:
    consumer = next(each for each in group.consumers if each.weight == weight)
    columns = group.columns(consumer)
    data = named_tensors(model)[weight].detach().movedim(1, 0)[columns].flatten(1).double().cpu()
    matrix = _regularised(moments.second, _takes_constants(group, weight))
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or moments.variance <= 0.0:
        return None
    inverse = torch.cholesky_inverse(factor)
    return _Consumer(inverse, data @ data.T, moments.variance, moments.rows)


def _choose(
    views: Sequence[_Consumer], dead: Tensor, budget: float, min_width: int
) -> tuple[list[int], float]:
    """The cheapest first, until the budget of some consumer is spent; the neurons, and what was spent. Those
    that are dead cost nothing, and nobody misses them."""
    size = len(dead)
    order = dead.nonzero().flatten().tolist()[: max(0, size - min_width)]
    alive = ~dead
    spent = torch.zeros(len(views), dtype=torch.float64)
    while len(order) < size - min_width:
        costs = torch.stack([view.costs(size - len(order)) for view in views]).amax(0)
        costs[~alive] = float("inf")
        count = min(BLOCK, size - min_width - len(order), int(alive.sum()))
        if count == 0:
            break
        block = costs.topk(count, largest=False).indices
        chosen = _choose_in_block(views, block, budget, spent, size - len(order))
        if not chosen:
            break
        gone = block[chosen]
        for view in views:
            view.eliminate_(gone, view.gram[gone][:, gone].clone())
        alive[gone] = False
        order += gone.tolist()
    return order, float(spent.max())


def _choose_in_block(
    views: Sequence[_Consumer], block: Tensor, budget: float, spent: Tensor, width: int
) -> list[int]:
    """One after another, with what the others in the block cost once it is gone; adds to `spent`."""
    inverses = torch.stack([view.inverse[block][:, block] for view in views])
    grams = torch.stack([view.gram[block][:, block] for view in views])
    scales = torch.tensor([view._optimism(width) / view.variance for view in views], dtype=torch.float64)
    chosen, alive = list[int](), torch.ones(len(block), dtype=torch.bool)
    for _ in range(len(block)):
        free = inverses.diagonal(dim1=1, dim2=2).clamp_min(1e-300)
        costs = grams.diagonal(dim1=1, dim2=2) / free * scales[:, None]
        worst = costs.amax(0)
        worst[~alive] = float("inf")
        at = int(worst.argmin())
        if not bool((spent + costs[:, at] <= budget).all()):
            break
        spent += costs[:, at]
        alive[at] = False
        chosen.append(at)
        column, pivot = inverses[:, :, at], inverses[:, at, at].clamp_min(1e-300)[:, None]
        factors = -column / pivot
        inverses = inverses + column[:, :, None] * factors[:, None, :]
        crossed = grams[:, :, at][:, :, None] * factors[:, None, :]
        own = grams[:, at, at][:, None, None] * factors[:, :, None] * factors[:, None, :]
        grams = grams + crossed + crossed.transpose(1, 2) + own
    return chosen


def _solve(second: Tensor, kept: Tensor, dropped: Tensor, constants: bool) -> Fold:
    matrix = _regularised(second, constants)
    base = torch.cat([kept, torch.tensor([len(second) - 1])]) if constants else kept
    factor = torch.linalg.cholesky(matrix[base][:, base])
    solved = torch.cholesky_solve(matrix[base][:, dropped], factor).T
    offsets = solved[:, -1].clone() if constants else torch.zeros(len(dropped), dtype=torch.float64)
    return Fold(coefficients=solved[:, : len(kept)].contiguous(), constants=offsets)
