"""hybridize: split the layers that data parallelism cannot afford."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from thinwire.errors import SettingError, check, check_count
from thinwire.parallel.batches import EqualBatches
from thinwire.parallel.choose import Choice, Costs, costs
from thinwire.parallel.layers import Candidate, candidates, count_rows, named_layers
from thinwire.parallel.network import Network, measure_network
from thinwire.parallel.plan import HybridPlan, LayerPlan
from thinwire.parallel.volumes import divisors
from thinwire.wire.backend import has_world, start_world
from thinwire.wire.values import gather_values


def hybridize(
    model: nn.Module,
    *,
    groups: int | Literal["auto"],
    layers: Sequence[str] | Literal["auto"],
    example: Any = None,
    network: Network | None = None,
    compute_s: float = 0.0,
    workers: int | None = None,
    dry_run: bool = False,
) -> HybridPlan:
    """Split some layers of `model` inside groups of workers; everything else stays data-parallel.

    The workers are cut into `groups` of consecutive ranks. Inside a group the workers share one copy of each
    split layer, a strip of its features each, and pass activations to each other; across groups its copies
    are trained data-parallel like the rest. The numbers are those of data-parallel training. All workers call
    it with the same model, before the optimizer is made and `attach` is called; all workers of a group need
    batches of one size.

    Args:
        model: changed in place: parameters of split layers become DTensors. All start from the weights of the
            first worker of their group, and after `attach` from those of the first group.
        groups: a divisor of the number of workers; 1 is pure model parallelism, the number of workers pure
            data parallelism. "auto": the number with the shortest expected step, one for all split layers
            unless a mix is expected to be 5 % faster.
        layers: names of layers, or patterns such as "classifier.*": nn.Linear, nn.Embedding and nn.LSTM (its
            input projections). "auto": those that are faster split.
        example: the input of one step on one worker, a tensor or a tuple of arguments; "auto" needs it to
            know how many rows go through each layer.
        network: rate and latency between workers. "auto" measures it if it is not given; a dry run for
            another number of workers compares bytes then.
        compute_s: seconds of forward and backward on one worker, which gradients hide behind; 0: nothing
            hides.
        workers: plan for this many workers instead of those of this job; only in a dry run.
        dry_run: only plan; the model stays as it is.

    Reference: Das et al., Distributed Deep Learning Using Synchronous SGD, 2016, arXiv:1602.06709.
    """
    check(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    check(layers == "auto" or not isinstance(layers, str), "layers", 'a list of names, or "auto"', layers)
    check(compute_s >= 0, "compute_s", "0 or more seconds", compute_s)
    automatic = groups == "auto" or layers == "auto"
    hint = "pass one batch of one worker, as the model takes it"
    check(not automatic or example is not None, "example", 'given with "auto"', None, hint=hint)
    num_workers = _num_workers(workers, dry_run)
    if groups != "auto":
        _check_groups(groups, num_workers)
    chosen = candidates(model) if layers == "auto" else named_layers(model, layers)
    rows = {} if example is None else count_rows(model, chosen, example)
    if network is None and automatic and workers is None and num_workers > 1:
        network = measure_network()
    options = _options(chosen, rows, num_workers, network, groups, optional=layers == "auto")
    rest_bytes = _bytes(model) - sum(_bytes(candidate.module) for candidate in chosen)
    rest_s = 0.0 if network is None else network.seconds(2 * (num_workers - 1) / num_workers * rest_bytes, 0)
    number = (
        Choice(options, rest_s, compute_s).best()
        if automatic
        else {candidate.name: int(groups) for candidate in chosen}
    )
    return _apply(model, chosen, number, options, network, num_workers, dry_run=dry_run)


def _options(
    chosen: Sequence[Candidate],
    rows: Mapping[str, float],
    num_workers: int,
    network: Network | None,
    groups: int | Literal["auto"],
    *,
    optional: bool,
) -> dict[str, dict[int, Costs]]:
    """By layer, the numbers of groups it may have, with what each costs."""
    found: dict[str, dict[int, Costs]] = {}
    for candidate in chosen:
        numbers = divisors(num_workers) if groups == "auto" else [groups]
        fitting = [number for number in numbers if candidate.has_strips(num_workers // number)]
        if not fitting and not optional:
            raise SettingError(
                f"layers: {candidate.name} has {candidate.num_features} features to split, which leaves some "
                f"of the {num_workers // numbers[0]} workers of a group without any",
                hint="use more groups, or leave this layer out",
            )
        if optional:
            fitting = sorted({*fitting, num_workers})
        sizes = candidate.sizes(rows.get(candidate.name, 0.0))
        path = network or Network(bits_per_s=8.0)
        found[candidate.name] = {
            number: costs(sizes, candidate.split, num_workers, number, path) for number in fitting
        }
    return found


def _apply(
    model: nn.Module,
    chosen: Sequence[Candidate],
    number: Mapping[str, int],
    options: Mapping[str, Mapping[int, Costs]],
    network: Network | None,
    num_workers: int,
    *,
    dry_run: bool,
) -> HybridPlan:
    split = [candidate for candidate in chosen if number[candidate.name] < num_workers]
    rest_bytes = _bytes(model) - sum(_bytes(candidate.module) for candidate in chosen)
    plan = HybridPlan(
        num_workers=num_workers,
        layers=tuple(
            _layer_plan(each, number[each.name], options[each.name], network, num_workers) for each in chosen
        ),
        rest_bytes=rest_bytes,
        styles={candidate.name: candidate.style() for candidate in split},
        meshes={
            groups: make_mesh(model, groups, num_workers)
            for groups in sorted({number[candidate.name] for candidate in split})
            if not dry_run
        },
    )
    for groups, mesh in plan.meshes.items():
        _warn_of_sites(groups, num_workers)
        here = [candidate for candidate in split if number[candidate.name] == groups]
        batches = EqualBatches(mesh["tp"].get_group(), next(model.parameters()).device)
        parallelize_module(model, mesh["tp"], {each.name: each.style(batches) for each in here})
        batches.hook(model)
    return plan


def make_mesh(model: nn.Module, groups: int, num_workers: int) -> DeviceMesh:
    """Rows are groups, which hold one copy of the split layers each; columns hold the same strip."""
    device = next(model.parameters()).device.type
    return init_device_mesh(device, (groups, num_workers // groups), mesh_dim_names=("dp", "tp"))


def _layer_plan(
    candidate: Candidate,
    groups: int,
    options: Mapping[int, Costs],
    network: Network | None,
    num_workers: int,
) -> LayerPlan:
    sizes = candidate.sizes(1.0)
    planned = options[groups]
    known = planned.activation_bytes > 0 or groups == num_workers
    data_bytes = sum(each.data_bytes(num_workers) for each in sizes)
    data_s = None if network is None else network.seconds(data_bytes, 0)
    return LayerPlan(
        name=candidate.name,
        split=candidate.split,
        groups=groups,
        weight_bytes=sum(each.num_weights * each.number_bytes for each in sizes),
        data_bytes=data_bytes if known else None,
        hybrid_bytes=planned.sent_bytes if known else None,
        saved_s=data_s - planned.gradient_s - planned.activation_s if data_s is not None and known else None,
    )


def _warn_of_sites(groups: int, num_workers: int) -> None:
    """Activations are waited for in every layer: a group should not span a thin uplink."""
    sites = [str(site) for site in gather_values(os.environ.get("THINWIRE_SITE", ""))]
    size = num_workers // groups
    for group in range(groups):
        members = sites[group * size : (group + 1) * size]
        if len(set(members)) > 1:
            warnings.warn(
                f"group {group} of {groups} (workers {group * size} to {(group + 1) * size - 1}) spans the "
                f"sites {', '.join(sorted(set(members)))}: its activations cross an uplink in every layer. "
                "Order ranks by site, or use more groups",
                stacklevel=4,
            )


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _num_workers(given: int | None, dry_run: bool) -> int:
    if given is not None:
        check_count("workers", given, "workers")
        check(dry_run, "workers", "given in a dry run only", given, hint="add dry_run=True")
        return given
    if not dist.is_initialized():
        if not has_world():
            return 1
        start_world()
    return dist.get_world_size()


def _check_groups(groups: int, num_workers: int) -> None:
    allowed = divisors(num_workers)
    rule = f'a divisor of the number of workers, {num_workers}, or "auto"'
    check(groups in allowed, "groups", rule, groups, hint=f"one of {', '.join(map(str, allowed))}")
