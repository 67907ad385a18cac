"""Colwise and rowwise splits of a layer whose input and output are each worker's own rows of the batch.

What `ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))` and the rowwise one do, as parallel
styles of torch: parameters become DTensors on the mesh, the layer's own forward computes with them. Only
activations travel by our own moves (see `activations`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.parallel.activations import ActivationGroup
from thinwire.parallel.batches import EqualBatches


def strip_widths(num_features: int, num_strips: int) -> list[int]:
    """How many features each worker of a group holds: those of DTensor's `Shard`.

    >>> strip_widths(30, 4)
    [8, 8, 8, 6]
    """
    width = -(-num_features // num_strips)
    return [max(0, min(width, num_features - i * width)) for i in range(num_strips)]


@dataclass
class BatchColwise(ParallelStyle):
    """Split a layer by its output features; all rows of the group come in, own rows go out."""

    name: str = "layer"
    batches: EqualBatches | None = None
    """By default each forward of the layer compares shapes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh, self.name, self.batches)
        dim = 1 if isinstance(module, nn.Embedding) else 0
        features = cast(Tensor, module.weight).shape[dim]
        widths = strip_widths(features, group.size)

        def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                split_(module, key, mesh, Shard(dim if parameter.dim() > 1 else 0), self.src_data_rank)

        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (_enter(group.gather_rows(inputs[0]), mesh, Replicate(), Partial()), *inputs[1:])

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return group.strip_to_rows(_leave(output, Shard(output.dim() - 1)), widths)

        return distribute_module(module, device_mesh, partition, enter, leave)


@dataclass
class BatchRowwise(ParallelStyle):
    """Split a linear layer by its input features; its partial outputs are summed over the group."""

    name: str = "layer"
    batches: EqualBatches | None = None
    """By default each forward of the layer compares shapes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh, self.name, self.batches)
        assert isinstance(module, nn.Linear)
        widths = strip_widths(module.in_features, group.size)

        def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            split_(module, "weight", mesh, Shard(1), self.src_data_rank)
            if module.bias is not None:
                split_(module, "bias", mesh, Replicate(), self.src_data_rank)

        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            strip = group.rows_to_strip(inputs[0], widths)
            placement = Shard(strip.dim() - 1)
            shape = (*strip.shape[:-1], sum(widths))
            return (_enter(strip, mesh, placement, placement, torch.Size(shape)), *inputs[1:])

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return group.sum_to_rows(_leave(output, Partial()))

        return distribute_module(module, device_mesh, partition, enter, leave)


def group_of(mesh: DeviceMesh, layer: str, batches: EqualBatches | None) -> ActivationGroup:
    group = mesh.get_group()
    batches = batches or EqualBatches(group, torch.device(mesh.device_type))
    return ActivationGroup(group, mesh.size(), mesh.get_local_rank(), layer, batches)


def split_(module: nn.Module, key: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Replace a parameter by a DTensor of which this worker holds one part."""
    whole = module.get_parameter(key)
    part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=source)
    module.register_parameter(key, nn.Parameter(part, requires_grad=whole.requires_grad))


class _Enter(torch.autograd.Function):
    """A local tensor as a DTensor; the gradient comes back as the local part of `gradient` placement."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement, shape: torch.Size
    ) -> Any:
        ctx.gradient = gradient
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, [placement], run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (gradient,) = outputs
        assert gradient.placements == (ctx.gradient,), f"a gradient of {gradient.placements}"
        return gradient.to_local(), None, None, None, None


def _enter(
    x: Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement, shape: torch.Size | None = None
) -> Tensor:
    result: Tensor = _Enter.apply(x, mesh, placement, gradient, shape or x.shape)  # type: ignore[no-untyped-call]
    return result


def _leave(output: DTensor, placement: Placement) -> Tensor:
    """The local part; its gradient is the local part of a DTensor laid out as the output."""
    assert output.placements == (placement,), f"an output of {output.placements}"
    return output.to_local(grad_placements=[Replicate() if placement.is_partial() else placement])
