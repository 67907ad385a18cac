"""Which workers hold copies of a parameter, where these are not all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.engine.buckets import local
from thinwire.engine.replica_group import Ranks
from thinwire.errors import check
from thinwire.wire.base import Lane


def replica_ranks_of(
    model: nn.Module,
    given: Mapping[str, Sequence[int]],
    process_group: dist.ProcessGroup | Lane | None,
    lane: Lane,
) -> dict[str, Ranks]:
    """The ranks that hold each parameter, where these are not all."""
    everyone = tuple(range(lane.world_size))
    found: dict[str, Ranks] = {}
    for name, parameter in model.named_parameters():
        ranks = next((tuple(r) for key, r in given.items() if (name + ".").startswith(key + ".")), None)
        if ranks is None and local(parameter) is not parameter:
            base = process_group if isinstance(process_group, dist.ProcessGroup) else None
            ranks = _mesh_ranks(parameter, dist.get_process_group_ranks(base))
        if ranks is None or ranks == everyone:
            continue
        inside = set(ranks) <= set(everyone) and len(set(ranks)) == len(ranks)
        check(inside, f"replica_ranks of {name}", f"different ranks below {lane.world_size}", ranks)
        check(lane.rank in ranks, f"replica_ranks of {name}", f"with this worker's rank {lane.rank}", ranks)
        found[name] = ranks
    some = [key for key, ranks in given.items() if tuple(ranks) != everyone]
    unknown = [key for key in some if not any((name + ".").startswith(key + ".") for name in found)]
    check(not unknown, "replica_ranks", "names of parameters or modules of the model", unknown)
    return found


def _mesh_ranks(parameter: Tensor, members: Sequence[int]) -> tuple[int, ...]:
    """The workers that hold the same part of a DTensor: along the mesh dimensions it is replicated on."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    root = mesh._get_root_mesh()  # a layer split along "tp" has its replicas along the other dimensions
    own, names = root.get_coordinate(), mesh.mesh_dim_names or range(mesh.ndim)
    assert own is not None, "a worker that holds a part of the tensor is in its mesh"
    split = {name for name, kind in zip(names, parameter.placements, strict=True) if not kind.is_replicate()}
    root_names = root.mesh_dim_names or range(root.ndim)
    place = tuple(at if name in split else slice(None) for at, name in zip(own, root_names, strict=True))
    return tuple(members.index(rank) for rank in root.mesh[place].reshape(-1).tolist())
