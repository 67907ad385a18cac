"""How many groups each layer should have: the number with the shortest expected step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.parallel.network import Network
from thinwire.parallel.volumes import LayerSize, Split

BACKWARD_SHARE = 2 / 3
"""Backward's part of a step's compute: two of three matrix products. Gradients hide behind it, activations
do not."""

MIX_GAIN = 0.05
"""Part of a step that a mix of numbers of groups must save: its costs are less sure than those of one."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes and seconds of one layer's messages per worker and step, for some number of groups."""

    gradient_bytes: float
    activation_bytes: float
    gradient_s: float
    activation_s: float

    @property
    def sent_bytes(self) -> float:
        return self.gradient_bytes + self.activation_bytes


def costs(sizes: Sequence[LayerSize], split: Split, num_workers: int, groups: int, network: Network) -> Costs:
    """Bytes and seconds of a layer of one or several matrices. Gradients share messages with other layers."""
    size = num_workers // groups
    activations = sum(each.number_bytes * each.activations(size, split) for each in sizes)
    gradients = sum(each.hybrid_bytes(num_workers, groups, split) for each in sizes) - activations
    moves = sum(each.activation_messages(size) for each in sizes)
    return Costs(
        gradient_bytes=gradients,
        activation_bytes=activations,
        gradient_s=network.seconds(gradients, 0),
        activation_s=network.seconds(activations, moves),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The layers to decide on, by name, with the costs of each allowed number of groups."""

    options: Mapping[str, Mapping[int, Costs]]
    rest_gradient_s: float
    """Seconds for the gradients of everything that stays data-parallel."""
    compute_s: float
    """Seconds of forward and backward of one worker."""

    def step_s(self, groups: Mapping[str, int]) -> float:
        """Seconds of compute, of activations, and of the gradients that backward does not hide."""
        chosen = [self.options[name][number] for name, number in groups.items()]
        gradients = self.rest_gradient_s + sum(each.gradient_s for each in chosen)
        activations = sum(each.activation_s for each in chosen)
        return self.compute_s + activations + max(0.0, gradients - BACKWARD_SHARE * self.compute_s)

    def best(self) -> dict[str, int]:
        """One number of groups for all layers that are split, or a mix that is expected to be much faster.

        Layers of one number share buckets; each further one sends messages that the costs do not know.
        """
        numbers = sorted({number for options in self.options.values() for number in options}, reverse=True)
        equal = [self._shortest([number]) for number in numbers] or [{}]
        best, mixed = min(equal, key=self.step_s), self._shortest(numbers)
        return mixed if self.step_s(mixed) < (1 - MIX_GAIN) * self.step_s(best) else best

    def _shortest(self, numbers: Sequence[int]) -> dict[str, int]:
        """Start with the most groups, and change one layer at a time to one of `numbers` while that helps.

        A tie keeps more groups: data parallelism needs nobody else in a forward.
        """
        groups = {name: max(options) for name, options in self.options.items()}
        for _ in range(3):
            before = dict(groups)
            for name, options in self.options.items():
                allowed = {max(options), *options.keys() & set(numbers)}
                groups[name] = -min((self.step_s({**groups, name: each}), -each) for each in allowed)[1]
            if groups == before:
                break
        return groups
