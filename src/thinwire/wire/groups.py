"""Process groups for lanes: made once, used again, ended before the interpreter is."""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.wire.waiters import blocked


class Pool:
    """Groups given back, for the next lane over the same ranks.

    Torch names a group made by its members alone after how many groups there are, so destroying
    one can give the next the name, and the stale addresses, of a living one. Hence none is
    destroyed before the default group is; connecting a full mesh is also the slow part of attach.
    """

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._free: dict[tuple[tuple[int, ...], float], list[dist.ProcessGroup]] = {}
        self._uses: dict[str, int] = {}

    def take(self, ranks: Sequence[int], timeout_s: float, name: str) -> dist.ProcessGroup:
        if self._world is not dist.group.WORLD:
            self._world, self._free, self._uses = dist.group.WORLD, {}, {}
        free = self._free.setdefault((tuple(ranks), timeout_s), [])
        if free:
            return free.pop(0)
        everybody = len(ranks) == dist.get_world_size()
        group = dist.new_group(
            list(ranks),
            timeout=datetime.timedelta(seconds=timeout_s),
            use_local_synchronization=not everybody,
            group_desc=f"thinwire {name}",
        )
        assert isinstance(group, dist.ProcessGroup), "this worker is not among the ranks of its own lane"
        return group

    def give_back(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        if self._world is dist.group.WORLD and self._world is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._free.setdefault((ranks, timeout_s), []).append(group)

    def use(self, group: dist.ProcessGroup) -> str:
        """A name for this use of the group, the same on all its workers."""
        uses = self._uses[group.group_name] = self._uses.get(group.group_name, 0) + 1
        return f"{group.group_name}/{uses}"

    def start_world(self, backend: str) -> None:
        """Start the default group, which is then ours to end."""
        dist.init_process_group(backend)
        atexit.register(_end_world)


def _end_world() -> None:
    if dist.is_initialized() and not blocked:  # a group with something under way cannot be destroyed
        dist.destroy_process_group()


pool = Pool()
