"""The arguments of attach from which a core is assembled, for every generation of workers anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from thinwire.engine import cut
from thinwire.engine.buffers import BufferPolicy
from thinwire.engine.companion import Companion
from thinwire.engine.core import Core
from thinwire.engine.link import Link
from thinwire.engine.replica_group import Ranks
from thinwire.engine.transport import Transport
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane


class Attachable(Protocol):
    """Settings of something that acts between steps."""

    def join(
        self, link: Link, model: nn.Module, optimizers: Sequence[Optimizer], *, num_steps: int | None
    ) -> Companion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A model, its optimizers and the settings that all workers have in common; see `attach`."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    strategy: Strategy
    bucket_bytes: int | None
    buffers: BufferPolicy
    sharded: bool
    num_steps: int | None
    apoptosis: Attachable | None
    encrypted: bool
    """Whether what is sent travels by TLS."""

    def describe(self) -> list[str]:
        """Lines that must be the same on all workers."""
        settings = [
            f"strategy {self.strategy!r}",
            f"bucket_bytes {self.bucket_bytes}",
            f"buffers {self.buffers}",
            f"sharded {self.sharded}",
            f"wire {'tls' if self.encrypted else 'plain'}",
        ]
        if self.apoptosis is not None:
            settings.append(f"apoptosis {self.apoptosis!r}")
        return settings + [f"optimizer {_describe(each)}" for each in self.optimizers]

    def new_core(self, lane: Lane, transport: Transport) -> Core:
        """A core that has no buckets yet."""
        core = Core(self.model, self.optimizers, self.strategy, lane, transport, buffers=self.buffers)
        core.sharded = self.sharded
        return core

    def cut(self, core: Core, group_of: Mapping[str, Ranks] | None = None) -> None:
        """Cut the model into buckets, and have the core start anew with them."""
        cut.cut(core, group_of or {}, self.bucket_bytes)

    def assembled_core(self, lane: Lane, transport: Transport) -> Core:
        """A core that is ready to train."""
        core = self.new_core(lane, transport)
        self.cut(core)
        transport.core = core
        return core

    def companion_of(self, link: Link) -> Companion | None:
        """What acts on the link between steps, joined to it."""
        if self.apoptosis is None:
            return None
        return self.apoptosis.join(link, self.model, self.optimizers, num_steps=self.num_steps)


def _describe(optimizer: Optimizer) -> str:
    rates = [f"{float(group['lr']):g}" for group in optimizer.param_groups if "lr" in group]
    return f"{type(optimizer).__name__} with learning rate {', '.join(rates) or 'unknown'}"
