"""torch's PostLocalSGD: exact SGD for some steps, then local steps with an average every few."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.rivals import Joined


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocalSgd:
    """Parameters are averaged every `period` steps, after `warmup_steps` of plain DDP."""

    name: str = "post-local-sgd"
    period: int = 8
    warmup_steps: int = 2

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        return self._join(model, optimizer)

    @contextmanager
    def _join(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        # Here, not on top: importing it warns about torch's own use of torch.jit.
        from torch.distributed.optim import PostLocalSGDOptimizer

        # One worker per host: a subgroup of one, inside which there is nothing to reduce.
        alone, all_alone = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=alone,
            start_localSGD_iter=self.warmup_steps,
            post_local_gradient_allreduce=False,
        )
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=self.period, warmup_steps=self.warmup_steps)
        try:
            yield wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager)
        finally:
            for group in all_alone:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
