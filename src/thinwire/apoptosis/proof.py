"""Which groups of neurons can be cut at all, tried on the model itself, and what is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.apoptosis.calls import Call, close, tensors_in, undisturbed
from thinwire.apoptosis.surgery import Removal, cut, kept_indices, named_tensors, replace_, resize_modules
from thinwire.apoptosis.units import Group

PROOF_ROWS = 2
"""Samples that a proof looks at."""


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """In here tensors may be replaced; after it the model has its own again."""
    before = {name: (t.detach(), t.grad) for name, t in named_tensors(model).items()}
    try:
        yield
    finally:
        for name, tensor in named_tensors(model).items():
            data, grad = before[name]
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                replace_(tensor, data)
                tensor.grad = grad
        resize_modules(model)


def prove(model: nn.Module, group: Group, call: Call) -> None:
    """Freeze a group, with the reason, unless the model without one of its neurons computes what it computes
    with that neuron's outgoing weights at zero. It is a proof by trial: whatever way the model uses its
    tensors, one that was overlooked shows."""
    if group.frozen:
        return
    if group.size < 2:
        group.frozen = "it is a single neuron"
        return
    removal, call = Removal(group=group, kept=torch.arange(1, group.size)), call.first(PROOF_ROWS)
    try:
        with borrowed(model), undisturbed(model):
            tensors = named_tensors(model)
            for consumer in group.consumers:
                zeroed = tensors[consumer.weight].detach().clone()
                zeroed[:, group.columns(consumer)[0]] = 0.0
                replace_(tensors[consumer.weight], zeroed)
            expected = _outputs(model, call)
            cut(model, (), kept_indices(model, [removal]))
            found = _outputs(model, call)
    except Exception as error:  # noqa: BLE001 (whatever a model does with sizes that are not its own)
        group.frozen = f"the model does not work without one of its neurons ({type(error).__name__})"
        return
    if len(expected) != len(found) or not all(map(close, expected, found)):
        group.frozen = "the model does not compute the same without one of its neurons"


def _outputs(model: nn.Module, call: Call) -> list[Tensor]:
    return [t.detach() for t in tensors_in(call.run(model))]


def left_alone(model: nn.Module, groups: Sequence[Group]) -> dict[str, str]:
    """Layers and parameters that no event touches, and why."""
    found = {group.name: group.frozen for group in groups if group.frozen}
    followed = {name for group in groups for name, _ in group.places}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name not in followed:
            found[name] = "no operation that is understood reads it"
    return found
