"""Which neurons the others can make up for, and how: least squares on recent data.

A neuron that goes is replaced by the best linear combination of those that stay,
h_j = sum c_ji h_i + constant, folded into the outgoing weights. With S = E[h h^T] the squared error of the
consumer's output is |a_j|^2 / (S^-1)_jj, and the errors of several eliminations, one after another, add up
(optimal brain surgeon, Hassibi & Stork 1992, by layer). Dead, constant and duplicate neurons, and those with
small outgoing weights, are the cheapest; what all of them may cost together is the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.apoptosis.criteria import add_constants, find_exact
from thinwire.apoptosis.moments import Moments
from thinwire.apoptosis.surgery import Fold, Removal
from thinwire.apoptosis.units import Group

RIDGES = (1e-6, 1e-5, 1e-4, 1e-3)
"""Ridges to try, relative to the mean square of the neurons; smaller differences count as none. The first
that is larger than the rounding of the sums is used: that grows the more alike neurons are."""
BLOCK = 64
"""Neurons that are weighed against each other before the rest is brought up to date."""
DEARER = 2.0
"""Largest cost of a neuron that goes with its block, as a multiple of the cheapest one outside."""
SMALLEST = 1e-200
TWIN = 100.0
"""Largest residual of a neuron that has a duplicate, after the others, as a multiple of the ridge."""


@dataclass(frozen=True, slots=True)
class _Takeover:
    """The fold of removed neurons into remaining ones, without its largest products."""

    stay: Tensor
    rows: Tensor
    """Indices of the neurons that stay, and of the constant."""
    columns: Tensor
    """Part of S^-1: rows of neurons that stay, columns of those that go."""
    solved: Tensor
    factors: Tensor
    crossed: Tensor
    """The product `crossed @ factors.T`, plus its transpose, is added to B."""


@dataclass(slots=True)
class _Consumer:
    """One consumer's view of the neurons that are left: the inverse of S, and B = a^T a over its outputs."""

    matrix: Tensor
    """All of S, also when some are gone."""
    whole_inverse: Tensor
    """All of S^-1."""
    inverse: Tensor
    """Inverse of S with a last row and column for the constant 1, where it can be folded."""
    gram: Tensor
    variance: float
    rows: float
    ridge: float
    """Number that was added to the diagonal of S."""

    def nearly_free(self) -> Tensor:
        """Which neurons may go by an exact rule: the others leave nothing of them, or nobody reads them."""
        left = 1.0 / self.inverse.diagonal()[: len(self.gram)].clamp_min(SMALLEST)
        return (left <= TWIN * self.ridge) | (self.gram.diagonal() == 0)

    def scale(self, width: int) -> float:
        """From squared errors on the samples to relative ones on others, which are larger: least squares
        fits the noise of its samples too."""
        left = self.rows - width
        return (self.rows / left) ** 2 / self.variance if left > 0 else float("inf")

    def costs(self, width: int) -> Tensor:
        """The relative squared error of the output if each neuron went now."""
        return self._costs(self.gram.diagonal(), self.inverse.diagonal()[: len(self.gram)], width)

    def _costs(self, grams: Tensor, inverses: Tensor, width: int) -> Tensor:
        return grams / inverses.clamp_min(SMALLEST) * self.scale(width)

    def costs_in_order(self, chosen: Tensor, width: int) -> Tensor:
        """The same if these go one after another: with C C^T the part of S^-1, rows of C^-1 are what each
        leaves of those before it."""
        gram = _square(self.gram, chosen).double()
        lower = torch.linalg.cholesky_ex(_square(self.inverse, chosen)).L
        rows = torch.linalg.solve_triangular(lower, torch.eye(len(chosen), dtype=gram.dtype), upper=False)
        costs: Tensor = ((rows @ gram) * rows).sum(1)
        return costs * self.scale(width)

    def keep_(self, stay: Tensor) -> None:
        """Forget neurons that nobody misses."""
        rows = self._with_constant(stay)
        self.inverse, self.gram = _square(self.inverse, rows), _square(self.gram, stay)

    def without(self, gone: Tensor, stay: Tensor) -> _Takeover:
        """The fold of these neurons into the others; changes nothing yet."""
        rows = self._with_constant(stay)
        columns = _select(self.inverse, rows, gone)
        solved = torch.linalg.solve(_square(self.inverse, gone), columns.T)
        # what of each neuron that goes the others take over
        factors = -solved[:, : len(stay)].T.to(self.gram.dtype)
        crossed = _select(self.gram, stay, gone)
        crossed.addmm_(factors, _square(self.gram, gone), alpha=0.5)
        return _Takeover(stay, rows, columns, solved, factors, crossed)

    def costs_after(self, takeover: _Takeover, width: int) -> Tensor:
        """The costs of those that stay, without the rest of what `take_over_` computes."""
        stay, count = takeover.stay, len(takeover.stay)
        less = (takeover.columns[:count] * takeover.solved[:, :count].T).sum(1)
        more = (takeover.crossed * takeover.factors).sum(1)
        inverses = self.inverse.diagonal()[stay] - less
        return self._costs(self.gram.diagonal()[stay] + 2.0 * more, inverses, width)

    def take_over_(self, takeover: _Takeover) -> None:
        """Remove the neurons, and fold them into the others."""
        self.inverse = _square(self.inverse, takeover.rows)
        self.inverse.addmm_(takeover.columns, takeover.solved, alpha=-1.0)
        crossed = takeover.crossed @ takeover.factors.T
        self.gram = _square(self.gram, takeover.stay).add_(crossed).add_(crossed.T)

    def _with_constant(self, stay: Tensor) -> Tensor:
        return torch.cat([stay, torch.arange(len(self.gram), len(self.inverse))])


def _square(symmetric: Tensor, chosen: Tensor) -> Tensor:
    return _select(symmetric, chosen, chosen)


def _select(symmetric: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Copying whole rows, twice, is faster than picking numbers from each."""
    return symmetric.index_select(0, columns).T.index_select(0, rows)


def eliminate(
    model: nn.Module,
    group: Group,
    moments: dict[str, Moments],
    *,
    budget: float,
    min_width: int = 1,
    multiple: int = 1,
) -> Removal | None:
    """Neurons that can go at a relative change (root mean square) of at most `budget` in every consumer's
    output, so that at least `min_width` stay and a multiple of `multiple`; None if there are none."""
    views = {each.weight: _view(model, group, each.weight, moments[each.weight]) for each in group.consumers}
    found = [view for view in views.values() if view is not None]
    if len(found) < len(views) or not found:
        return None
    dead = torch.stack([moments[each.weight].largest for each in group.consumers]).amax(0) == 0
    exact = torch.stack([view.nearly_free() for view in found]).all(0) & ~dead
    order, spent = _choose(found, dead, budget**2, min_width)
    order = order[: group.down_to_multiple(len(order), multiple)]
    if not order:
        return None
    gone = torch.zeros(group.size, dtype=torch.bool)
    gone[order] = True
    kept, dropped = (~gone).nonzero().flatten(), gone.nonzero().flatten()
    folds = {weight: _solve(view, kept, dropped) for weight, view in zip(views, found, strict=True)}
    num_dead = int(dead[dropped].sum())
    causes = +Counter({"dead": num_dead, "made up for by others": len(dropped) - num_dead})
    if exact[dropped].any():
        means = {weight: each.mean[exact] for weight, each in moments.items()}
        named = _exact_causes(model, group.pick(exact.nonzero().flatten()), means, gone[exact])
        causes = causes - Counter({"made up for by others": named.total()}) + named
    return Removal(group=group, kept=kept, folds=folds, causes=dict(causes), change=spent**0.5)


def _exact_causes(
    model: nn.Module, candidates: Group, means: dict[str, Tensor], gone: Tensor
) -> Counter[str]:
    """Numbers of removed neurons that an exact rule would have removed, by rule."""
    merges = find_exact(model, candidates)
    add_constants(model, merges, means)
    return Counter(cause for neuron, cause in merges.causes.items() if gone[neuron])


def _takes_constants(group: Group, weight: str) -> bool:
    consumer = next(each for each in group.consumers if each.weight == weight)
    return consumer.takes_constants and "pad" not in group.operations


def _factored(second: Tensor, constants: bool) -> tuple[Tensor, Tensor, float] | None:
    """S with a ridge, which may be `second` itself, its Cholesky factor, and the ridge."""
    matrix = second if constants else second[:-1, :-1].clone()
    squares = second.diagonal()[:-1].clone()
    mean = float(squares.mean())
    for ridge in RIDGES:
        torch.add(squares, ridge * mean + 1e-30, out=matrix.diagonal()[: len(squares)])
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not int(info):
            return matrix, factor, ridge * mean
    return None


def _view(model: nn.Module, group: Group, weight: str, moments: Moments) -> _Consumer | None:
    consumer = next(each for each in group.consumers if each.weight == weight)
    columns = group.columns(consumer)
    data = model.get_parameter(weight).detach().movedim(1, 0)[columns].flatten(1)
    data = data.to("cpu", torch.promote_types(data.dtype, torch.float32))
    found = _factored(moments.second, _takes_constants(group, weight))
    if found is None or moments.variance <= 0.0:
        return None
    matrix, factor, ridge = found
    inverse, gram = torch.cholesky_inverse(factor), data @ data.T
    return _Consumer(matrix, inverse, inverse, gram, moments.variance, moments.rows, ridge)


def _choose(
    views: Sequence[_Consumer], dead: Tensor, budget: float, min_width: int
) -> tuple[list[int], float]:
    """The cheapest first, until the budget of some consumer is spent; the neurons, and what was spent. Those
    that are dead cost nothing, and nobody misses them."""
    order = dead.nonzero().flatten().tolist()[: max(0, len(dead) - min_width)]
    left = (~dead).nonzero().flatten()
    width = len(dead) - len(order)
    for view in views if len(left) < len(dead) else ():
        view.keep_(left)
    spent = torch.zeros(len(views), dtype=torch.float64)
    while (count := min(BLOCK, width - min_width, len(left))) > 0:
        costs = torch.stack([view.costs(width) for view in views]).amax(0)
        cheapest = costs.topk(min(count + 1, len(costs)), largest=False)
        block, values = cheapest.indices[:count], cheapest.values
        if not values[0] <= budget:
            break  # also where there are fewer samples than neurons: costs are infinite
        outside = float(values[count]) if len(values) > count else float("inf")
        chosen, added = _choose_in_block(views, block, budget - spent, DEARER * outside, width)
        if not len(chosen):
            break
        spent += added
        stays = torch.ones(len(left), dtype=torch.bool)
        stays[chosen] = False
        gone, stay = (~stays).nonzero().flatten(), stays.nonzero().flatten()
        order += left[gone].tolist()
        left, width = left[stay], width - len(gone)
        if width <= min_width or not len(left):
            break
        takeovers = [view.without(gone, stay) for view in views]
        after = zip(views, takeovers, strict=True)
        if not _some_fit(
            torch.stack([view.costs_after(each, width) for view, each in after]), budget - spent
        ):
            break
        for view, takeover in zip(views, takeovers, strict=True):
            view.take_over_(takeover)
    return order, float(spent.max())


def _some_fit(costs: Tensor, budgets: Tensor) -> bool:
    """Whether the cheapest neuron is within what is left to every consumer."""
    return costs.shape[1] > 0 and bool((costs[:, costs.amax(0).argmin()] <= budgets).all())


def _choose_in_block(
    views: Sequence[_Consumer], block: Tensor, budgets: Tensor, dearest: float, width: int
) -> tuple[Tensor, Tensor]:
    """The neurons of a block to remove, in order of cost, and the error this adds for each consumer.

    First without those that cost more than `dearest` once all before them are gone, such as the last of
    several that are alike; then as many as the budget allows.
    """
    costs = torch.stack([view.costs_in_order(block, width) for view in views])
    chosen = block[costs.amax(0) <= dearest]
    if 0 < len(chosen) < len(block):
        costs = torch.stack([view.costs_in_order(chosen, width) for view in views])
    totals = costs[:, : len(chosen)].cumsum(1)
    count = int((totals <= budgets[:, None]).all(0).sum())
    return chosen[:count], totals[:, count - 1] if count else torch.zeros_like(budgets)


def _solve(view: _Consumer, kept: Tensor, dropped: Tensor) -> Fold:
    """The fold into neurons that stay; a row and column of S more than neurons stands for the constant 1."""
    matrix, count = view.matrix, len(kept) + len(dropped)
    base = torch.cat([kept, torch.arange(count, len(matrix))])
    if len(dropped) < len(base):  # the smaller system: with P = S^-1, S_dk S_kk^-1 = -P_dd^-1 P_dk
        factor = torch.linalg.cholesky_ex(_square(view.whole_inverse, dropped)).L
        solved = -torch.cholesky_solve(_select(view.whole_inverse, dropped, base), factor)
    else:
        factor = torch.linalg.cholesky_ex(_square(matrix, base)).L
        solved = torch.cholesky_solve(_select(matrix, base, dropped), factor).T
    constants = len(matrix) > count
    offsets = solved[:, -1].clone() if constants else torch.zeros(len(dropped), dtype=torch.float64)
    return Fold(coefficients=solved[:, : len(kept)].contiguous(), constants=offsets)
