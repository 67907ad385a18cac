"""torch's DistributedDataParallel, plain and with its gradient compression hooks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.rivals import Joined


def joined(wrapped: DistributedDataParallel, optimizer: Optimizer) -> Joined:
    """The hooks on the parameters live as long as the wrapper, so the caller must not keep it."""
    return nullcontext((wrapped, optimizer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ddp:
    """Exact SGD: buckets are all-reduced while backward runs."""

    name: str = "ddp"
    bucket_cap_mb: int | None = None
    """None: 25 MiB and a first bucket of 1 MiB; with a number, the first one is as large as the others."""
    views: bool = False
    """DDP's `gradient_as_bucket_view`."""
    period: int = 1

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        cap_mb, views = self.bucket_cap_mb, self.views
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=views)
        return joined(wrapped, optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16:
    """DDP with gradients in half precision on the wire."""

    name: str = "ddp-fp16"
    period: int = 1

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return joined(wrapped, optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSgd:
    """DDP with gradients as products of two thin matrices of this rank."""

    rank: int
    start_step: int = 2
    """Steps of plain all-reduce first; torch's default of 1000 would hide it in a short run."""
    period: int = 1

    @property
    def name(self) -> str:
        return f"ddp-powersgd-{self.rank}"

    def available(self) -> str | None:
        return None

    def join(self, model: nn.Module, optimizer: Optimizer) -> Joined:
        state = powerSGD_hook.PowerSGDState(None, self.rank, self.start_step)
        # One bucket: with two under way, both of Gloo's threads wait in the hook for a third (torch 2.13).
        whole_mb = 1 + sum(p.nbytes for p in model.parameters()) // 2**20
        wrapped = DistributedDataParallel(model, bucket_cap_mb=whole_mb)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return joined(wrapped, optimizer)
