"""Activity of a group's neurons on recent data: second moments of what their consumers read.

For a consumer with input h and outgoing weights a_j, the sums are E[h h^T] over samples, places (behind a
flatten or in an image) and taps of a kernel, so that |a_j|^2 E[e^2] bounds what an error e of neuron j
changes in its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.apoptosis.calls import Call, undisturbed
from thinwire.apoptosis.units import Consumer, Group

MOST_ROWS = 16
"""Rows per neuron at most: neighbouring pixels say little more."""
FEWEST_NEURONS = 256
"""Narrower layers are weighed on as many samples as one of this width."""


@dataclass(slots=True)
class Moments:
    """Sums for one consumer of one group; they can be added up over calls and workers."""

    products: Tensor
    """Sums of h h^T, with a last row and column for the constant 1."""
    output: Tensor
    """Number of samples, sum of squares, and sums by output: the variance of what the consumer computes."""
    rows: float = 0.0

    def flat(self) -> Tensor:
        """All numbers once: products are symmetric."""
        count = torch.tensor([self.rows], dtype=torch.float64)
        return torch.cat([self.products[*self._upper()], self.output, count])

    def set_(self, flat: Tensor) -> None:
        upper = self._upper()
        split = flat.split([upper.shape[1], self.output.numel(), 1])
        self.products = torch.zeros_like(self.products)
        self.products[*upper] = self.products.T[*upper] = split[0]
        self.output, self.rows = split[1].clone(), float(split[2])

    def _upper(self) -> Tensor:
        return torch.triu_indices(len(self.products), len(self.products))

    @property
    def second(self) -> Tensor:
        """E[(h, 1) (h, 1)^T]."""
        return self.products / max(float(self.output[0]), 1.0)

    @property
    def variance(self) -> float:
        """Variance of the consumer's output, summed over outputs."""
        count = max(float(self.output[0]), 1.0)
        return max(float(self.output[1]) / count - float((self.output[2:] / count).square().sum()), 0.0)

    @property
    def largest(self) -> Tensor:
        """Root mean square of each neuron."""
        return (self.products.diagonal()[:-1] / max(float(self.output[0]), 1.0)).clamp_min(0.0).sqrt()

    @property
    def mean(self) -> Tensor:
        """Mean of each neuron."""
        return self.products[:-1, -1] / max(float(self.products[-1, -1]), 1e-300)


Table = dict[tuple[int, str], Moments]
"""Moments by group and by weight of the consumer."""


def measurable(model: nn.Module, group: Group) -> bool:
    """Whether all that its consumers read can be seen from outside."""
    return all(_reader(model, each) is not None for each in group.consumers)


def empty_table(model: nn.Module, groups: Sequence[Group]) -> Table:
    table: Table = {}
    for number, group in enumerate(groups):
        for each in group.consumers if not group.frozen and measurable(model, group) else ():
            outputs = model.get_parameter(each.weight).shape[0]
            zeros = torch.zeros(group.size + 1, group.size + 1, dtype=torch.float64)
            table[number, each.weight] = Moments(zeros, torch.zeros(2 + outputs, dtype=torch.float64))
    return table


def measure(model: nn.Module, groups: Sequence[Group], calls: Sequence[Call]) -> Table:
    """Run the model on recent calls, in evaluation mode, and add up what consumers read."""
    table = empty_table(model, groups)
    with undisturbed(model), _watching(model, groups, table, len(calls)):
        for call in calls:
            call.run(model)
    return table


@contextmanager
def _watching(model: nn.Module, groups: Sequence[Group], table: Table, num_calls: int) -> Iterator[None]:
    watches = []
    for (number, weight), moments in table.items():
        consumer = next(each for each in groups[number].consumers if each.weight == weight)
        module = model.get_submodule(consumer.module)
        read = _reader(model, consumer)
        assert read is not None
        watch = _Watch(moments, read, groups[number].columns(consumer), module, num_calls)
        watches.append((watch, module.register_forward_hook(watch, with_kwargs=True)))
    try:
        yield
        for watch, _ in watches:
            watch.add()
    finally:
        for _, handle in watches:
            handle.remove()


Read = Callable[[Tensor, Any], tuple[Tensor, Tensor]]
"""Turns input and result of a module into input and output by samples, features, and places."""


def _reader(model: nn.Module, consumer: Consumer) -> Read | None:
    module = model.get_submodule(consumer.module)
    if isinstance(module, nn.Linear):
        return lambda given, result: (given.flatten(0, -2)[..., None], result.flatten(0, -2)[..., None])
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        dim = module.weight.dim() - 2
        return lambda given, result: (
            given.reshape(-1, *given.shape[-1 - dim :]).flatten(2),
            result.reshape(-1, *result.shape[-1 - dim :]).flatten(2),
        )
    if isinstance(module, nn.RNNBase) and module.num_layers == 1 and not module.bidirectional:
        if "weight_ih" in consumer.weight:
            return lambda given, result: _sequence(given, result[0])
        return lambda given, result: _sequence(result[0], result[0])  # what it reads one moment later
    return None


def _sequence(given: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    return given.flatten(0, -2)[..., None], result.flatten(0, -2)[..., None]


def _squared(rows: Tensor) -> Tensor:
    """rows^T rows: a quarter of it is a copy, since it is symmetric."""
    half, found = rows.shape[1] // 2, rows.new_empty(rows.shape[1], rows.shape[1])
    torch.mm(rows[:, :half].T, rows, out=found[:half])
    torch.mm(rows[:, half:].T, rows[:, half:], out=found[half:, half:])
    found[half:, :half] = found[:half, half:].T
    return found


class _Watch:
    """A hook that adds what one consumer reads to its moments."""

    def __init__(
        self, moments: Moments, read: Read, columns: Tensor, module: nn.Module, num_calls: int
    ) -> None:
        self._moments, self._read = moments, read
        self._most_rows = MOST_ROWS * max(FEWEST_NEURONS, len(columns)) // num_calls
        self._columns = columns.to(next(module.parameters()).device)
        self._all_in_order = columns.equal(torch.arange(len(columns))[:, None])
        self._kernel = module.get_parameter("weight")[0, 0].numel() if hasattr(module, "weight") else 1
        self._recurs = isinstance(module, nn.RNNBase)
        self._waiting: list[Tensor] = []
        """Rows of calls, times the root of what each counts: one large product is faster than many small
        ones."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        inputs, outputs = self._read(given.detach(), result)
        width, places = self._columns.shape[0], inputs.shape[-1]
        # samples, neurons, columns of each, places
        whole = self._all_in_order and inputs.shape[1] == width
        chosen = inputs.unsqueeze(2) if whole else inputs[:, self._columns]
        rows = chosen.movedim(1, -1).reshape(-1, width)  # neurons, then all places of all samples
        taken = len(rows) // max(1, self._most_rows) | 1  # odd, so as not to follow the rows of images
        rows = rows[::taken]
        # sums over columns of a neuron and taps of the kernel; a mean over the places of an image
        counts = (taken * self._kernel / (places if self._kernel > 1 or places > 1 else 1)) ** 0.5
        if self._recurs and given.dim() == 3:
            # an error stays in the state: those of all moments add up, as independent ones do
            counts *= given.shape[1 if module.batch_first else 0] ** 0.5
        exact = torch.promote_types(rows.dtype, torch.float32)
        kept = torch.full((len(rows), width + 1), counts, dtype=exact, device=rows.device)
        torch.mul(rows.to(exact), counts, out=kept[:, :-1])
        self._waiting.append(kept)
        self._moments.rows += len(rows)
        self._observe(outputs.detach(), len(inputs))

    def add(self) -> None:
        """Add the rows of all calls."""
        if self._waiting:
            rows = torch.cat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
            self._moments.products += _squared(rows).cpu()
            self._waiting.clear()

    def _observe(self, outputs: Tensor, samples: int) -> None:
        """Add the consumer's outputs to its moments."""
        places, total = outputs.shape[-1], self._moments.output
        total[0] += samples
        total[1] += float(torch.linalg.vector_norm(outputs, dtype=torch.float64)) ** 2 / places
        if outputs.shape[1] == len(total) - 2:  # not gates of a recurrent layer: their outputs stand for them
            total[2:] += outputs.sum((0, 2), dtype=torch.float64).cpu() / places
