"""The plan of a hybrid training: which layers are split, in how many groups, and what that saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.parallel.volumes import Split
from thinwire.units import as_bytes, as_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer that is split."""

    name: str
    split: Split
    groups: int
    """Copies of the layer: each is spread over the workers of one group."""
    weight_bytes: int
    data_bytes: float | None = None
    """Sent per worker and step if it stayed data-parallel; None: the rows of a batch are not known."""
    hybrid_bytes: float | None = None
    """Sent per worker and step as planned."""
    saved_s: float | None = None
    """Seconds on the wire that it saves in a step; None: the network is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPlan:
    """What `hybridize` does to a model; it prints, and its `styles` are a plan for `parallelize_module`."""

    num_workers: int
    layers: tuple[LayerPlan, ...]
    rest_bytes: int
    """Weights of everything that stays data-parallel."""
    styles: Mapping[str, ParallelStyle] = field(repr=False)
    """By layer, as `parallelize_module(model, plan.mesh["tp"], plan.styles)` takes them."""
    meshes: Mapping[int, DeviceMesh] = field(default_factory=dict, repr=False)
    """By number of groups; empty in a dry run."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh, with dimensions "dp" and "tp", where all layers have the same number of groups."""
        [mesh] = self.meshes.values()
        return mesh

    def __str__(self) -> str:
        head = (
            "layer",
            "placement",
            "groups",
            "weights",
            "of a worker",
            "data-parallel",
            "as planned",
            "saved",
        )
        rows = [head, *(self._row(layer) for layer in self.layers)]
        rest = as_bytes(self.rest_bytes)
        rows.append(("everything else", "data-parallel", str(self.num_workers), rest, rest, "", "", ""))
        used = [column for column in zip(*rows, strict=True) if any(column[1:])]
        rows = list(zip(*used, strict=True))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join(
            [f"hybrid plan for {self.num_workers} workers; bytes sent per worker and step", *lines]
        )

    def _row(self, layer: LayerPlan) -> tuple[str, ...]:
        size = self.num_workers // layer.groups
        sent = [layer.data_bytes, layer.hybrid_bytes]
        return (
            layer.name,
            layer.split if size > 1 else "data-parallel",
            f"{layer.groups} of {size}",
            as_bytes(layer.weight_bytes),
            as_bytes(layer.weight_bytes / size),
            *("" if count is None else as_bytes(count) for count in sent),
            "" if layer.saved_s is None else as_seconds(layer.saved_s),
        )
