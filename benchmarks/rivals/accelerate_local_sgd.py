"""Hugging Face Accelerate's LocalSGD: parameters are averaged every few steps, one after another."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateLocalSgd:
    """Local steps; parameters are averaged every `sync_every` of them."""

    name: str = "accelerate-local-sgd"
    sync_every: int = 8

    @property
    def period(self) -> int:
        return self.sync_every

    def available(self) -> str | None:
        if importlib.util.find_spec("accelerate") is None:
            return "not installed: pip install accelerate==1.15.0"
        return None

    @contextmanager
    def join(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD
        from accelerate.state import AcceleratorState

        # It takes over the process group that is there, but looks for it in the environment; its state is
        # global, and must go with it.
        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        for name, value in {**told, "MASTER_ADDR": "localhost"}.items():
            os.environ.setdefault(name, value)
        accelerator = Accelerator(cpu=True)
        wrapped = accelerator.prepare_model(model)
        try:
            with LocalSGD(accelerator, wrapped, local_sgd_steps=self.sync_every) as local:
                hook = optimizer.register_step_post_hook(lambda *_: local.step())
                yield wrapped, optimizer
                hook.remove()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
