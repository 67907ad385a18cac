"""hybridize: split the layers that data parallelism cannot afford."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from thinwire.errors import SettingError, check
from thinwire.parallel.layers import Candidate, named_layers
from thinwire.parallel.plan import HybridPlan, LayerPlan
from thinwire.parallel.volumes import divisors
from thinwire.wire.backend import has_world, start_world


def hybridize(model: nn.Module, *, groups: int, layers: Sequence[str], dry_run: bool = False) -> HybridPlan:
    """Split some layers of `model` inside groups of workers; everything else stays data-parallel.

    The workers are cut into `groups` of consecutive ranks. Inside a group the workers share one copy of each
    split layer, a strip of its features each, and pass activations to each other; across groups its copies
    are trained data-parallel like the rest. The numbers are those of data-parallel training. All workers call
    it with the same model, before the optimizer is made and `attach` is called; all workers of a group need
    batches of one size.

    Args:
        model: changed in place: parameters of split layers become DTensors. All start from the weights of the
        first
            worker of their group.
        groups: a divisor of the number of workers; 1 is pure model parallelism, the number of workers pure
        data
            parallelism.
        layers: names of layers, or patterns such as "classifier.*": nn.Linear, nn.Embedding and nn.LSTM (its
        input
            projections).
        dry_run: only plan; the model stays as it is.

    Reference: Das et al., Distributed Deep Learning Using Synchronous SGD, 2016, arXiv:1602.06709.
    """
    check(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    check(not isinstance(layers, str), "layers", "a list of names", layers)
    num_workers = _num_workers()
    _check_groups(groups, num_workers)
    chosen = named_layers(model, layers)
    for candidate in chosen:
        _check_strips(candidate, num_workers // groups)
    split = [candidate for candidate in chosen if groups < num_workers]
    meshes = {}
    if split and not dry_run:
        meshes[groups] = make_mesh(model, groups, num_workers)
    plan = HybridPlan(
        num_workers=num_workers,
        layers=tuple(_layer_plan(candidate, groups) for candidate in chosen),
        rest_bytes=_bytes(model) - sum(_bytes(candidate.module) for candidate in chosen),
        styles={candidate.name: candidate.style() for candidate in split},
        meshes=meshes,
    )
    for number, mesh in meshes.items():
        names = [layer.name for layer in plan.layers if layer.groups == number]
        parallelize_module(model, mesh["tp"], {name: plan.styles[name] for name in names})
    return plan


def make_mesh(model: nn.Module, groups: int, num_workers: int) -> DeviceMesh:
    """Rows are groups, which hold one copy of the split layers each; columns hold the same strip."""
    device = next(model.parameters()).device.type
    return init_device_mesh(device, (groups, num_workers // groups), mesh_dim_names=("dp", "tp"))


def _layer_plan(candidate: Candidate, groups: int) -> LayerPlan:
    size = sum(each.num_weights * each.number_bytes for each in candidate.sizes(1.0))
    return LayerPlan(name=candidate.name, split=candidate.split, groups=groups, weight_bytes=size)


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _num_workers() -> int:
    if not dist.is_initialized():
        if not has_world():
            return 1
        start_world()
    return dist.get_world_size()


def _check_groups(groups: int, num_workers: int) -> None:
    rule = f"a divisor of the number of workers, {num_workers}"
    allowed = divisors(num_workers)
    check(groups in allowed, "groups", rule, groups, hint=f"one of {', '.join(map(str, allowed))}")


def _check_strips(candidate: Candidate, size: int) -> None:
    if not candidate.has_strips(size):
        raise SettingError(
            f"layers: {candidate.name} has {candidate.num_features} features to split, which leaves some of "
            f"the {size} workers of a group without any",
            hint="use more groups, or leave this layer out",
        )
