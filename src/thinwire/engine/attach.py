"""attach: join a strategy to a user's model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire.elastic.world import Elastic, World
from thinwire.engine.arguments import (
    check_elastic,
    check_held,
    check_numbers,
    check_sharded,
    check_training,
    check_wire,
)
from thinwire.engine.assembly import Assembly, Attachable
from thinwire.engine.buckets import local
from thinwire.engine.buffers import BufferPolicy
from thinwire.engine.core import Core
from thinwire.engine.link import Link
from thinwire.engine.regroup import Regrouper
from thinwire.engine.replica_group import Ranks
from thinwire.engine.replica_ranks import replica_ranks_of
from thinwire.engine.replicas import Replicas, describe
from thinwire.engine.runtime import LinkRuntime
from thinwire.engine.transport import Transport
from thinwire.errors import check, check_one_of
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane
from thinwire.wire.connect import connect
from thinwire.wire.local import LocalWorld
from thinwire.wire.patience import Patience
from thinwire.wire.tls.files import TLS, Contexts
from thinwire.wire.watch import SILENCE_S
from thinwire.wire.work import Work

_log = logging.getLogger(__name__)
TIMEOUT_S = 1800.0


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy,
    *,
    process_group: dist.ProcessGroup | Lane | None = None,
    replica_ranks: Mapping[str, Sequence[int]] | None = None,
    bucket_bytes: int | None = None,
    buffers: BufferPolicy = "rank0",
    sharded: bool = False,
    timeout_s: float = TIMEOUT_S,
    silence_s: float = SILENCE_S,
    num_steps: int | None = None,
    elastic: bool | Elastic = False,
    apoptosis: Attachable | None = None,
    wire: Literal["plain", "tls"] | TLS = "plain",
) -> Link:
    """Train `model` together with the other workers, the way `strategy` says.

    All workers call it with the same model; they start from rank 0's weights and buffers. Model,
    optimizer and their state dicts stay the user's own. The default process group is used, and started
    if nobody has and torchrun, Slurm or Kubernetes have set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    otherwise it is a world of one, which sends nothing.

    Args:
        model: an ordinary module, not wrapped in DDP or FSDP; compiled is fine. Of a DTensor its local part
            is trained, together with the workers that hold the same part.
        optimizer: any torch.optim optimizer over the model's parameters, or a list of several, each with
            parameters of its own: a step is over when all of them have stepped.
        strategy: how the workers talk, such as `AllReduce()`.
        process_group: the workers to train with, if not all of them (or a lane of a test's own).
        replica_ranks: parameters, by name or the name of their module, that only some workers hold copies of:
            the ranks of those that hold this worker's copy.
        bucket_bytes: gradients travel in pieces of about this size; by default the strategy's number of them,
            of at most 25 MiB and at least 256 KiB (512 KiB in small models), and 64 KiB per worker.
        buffers: batch-norm statistics after each step are "rank0"'s, their "average", or "local";
            under a strategy that lets replicas differ they are always local.
        sharded: each worker keeps the optimizer state of one strip of the parameters, steps that strip, and
            gives it to the others during the next forward; with AllReduce and elementwise optimizers.
        timeout_s: how long to wait for a worker that is alive before giving up.
        silence_s: a worker that is not heard of for this long is lost; raise it where code holds the
            interpreter's lock for many seconds at a time.
        num_steps: optimizer steps that the training will make, if known: a strategy that needs more of them
            says so now, and not when it is detached.
        elastic: go on when workers die, freeze, come back or join (see docs/elastic.md): True, or `Elastic`
            with settings.
        apoptosis: `tw.Apoptosis(...)`, if the network is to shrink while it trains.
        wire: "tls", or `TLS(file=...)`: gradients and weights travel by mutual TLS, with the certificate
            that `thinwire keys new --tls` has made (see docs/security.md); "plain": by torch's own backends.

    >>> import torch, thinwire as tw
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tw.attach(model, optimizer, tw.AllReduce()) as link:
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> link.stats.steps, link.stats.sent_bytes
    (1, 0)
    """
    optimizers = check_training(model, optimizer, strategy)
    check_one_of("buffers", buffers, get_args(BufferPolicy))
    check_numbers(bucket_bytes, timeout_s, silence_s, num_steps)
    world_settings = elastic if isinstance(elastic, Elastic) else Elastic()
    tls = check_wire(wire, process_group, world_settings.key_file, model)
    check_held(model, optimizers, strategy)
    if sharded:
        check_sharded(model, optimizers, strategy)
        check(apoptosis is None, "sharded", "False where the network shrinks (apoptosis)", sharded)
    assembly = Assembly(
        model=model,
        optimizers=optimizers,
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        buffers=buffers,
        sharded=sharded,
        num_steps=num_steps,
        apoptosis=apoptosis,
        encrypted=tls is not None,
    )
    if elastic:
        check(not sharded, "sharded", "False where elastic=True", sharded)
        check(apoptosis is None, "apoptosis", "left out where elastic=True", apoptosis)
        check_elastic(strategy, process_group, replica_ranks, model)
        world = World(world_settings, timeout_s=timeout_s, silence_s=silence_s, tls=tls)
        return _link_elastic(assembly, world, timeout_s, silence_s)
    lane = _lane_of(process_group, timeout_s, silence_s, tls)
    group_of = replica_ranks_of(model, replica_ranks or {}, process_group, lane)
    return _link(assembly, lane, group_of, timeout_s, silence_s)


def _lane_of(
    process_group: dist.ProcessGroup | Lane | None, timeout_s: float, silence_s: float, tls: Contexts | None
) -> Lane:
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return connect(process_group, timeout_s, silence_s, tls) or LocalWorld(1).lane(0)
    return process_group


def _link_elastic(assembly: Assembly, world: World, timeout_s: float, silence_s: float) -> Link:
    regrouper = Regrouper(world, assembly.assembled_core, assembly.describe(), timeout_s)
    core, transport = regrouper.form(None)
    if core.lane.rank == 0:
        # the level that is shown to those who have not set up logging
        _log.warning(Patience(silence_s).describe(timeout_s, elastic=True))
    return Link(LinkRuntime(core, transport, assembly.cut, regrouper=regrouper))


def _link(
    assembly: Assembly, lane: Lane, group_of: Mapping[str, Ranks], timeout_s: float, silence_s: float
) -> Link:
    transport = Transport(lane, timeout_s)
    try:
        core = assembly.new_core(lane, transport)
        _start_alike(core, timeout_s, assembly.describe(), group_of)
        cut = partial(assembly.cut, group_of=group_of)
        cut(core)
        transport.core = core
        if lane.rank == 0 < lane.world_size - 1:
            _log.info(Patience(silence_s).describe(timeout_s, elastic=False))
            if advice := assembly.strategy.advice(assembly.num_steps, lane.world_size):
                _log.warning(advice)
        runtime = LinkRuntime(core, transport, cut, advises=assembly.num_steps is None)
        link = Link(runtime)
        runtime.companion = assembly.companion_of(link)
        return link
    except BaseException:
        transport.stop()
        lane.close()
        raise


def _start_alike(core: Core, timeout_s: float, settings: list[str], group_of: Mapping[str, Ranks]) -> None:
    """Make sure that all replicas have the same parameters and settings, and give them the first one's."""
    named = list(core.model.named_parameters())

    def wait(work: Work) -> None:
        if not work.wait(timeout_s):
            raise core.lane.late_error(
                f"worker {core.lane.rank} has waited {timeout_s:g} s for the others to attach"
            )

    for group in (None, *dict.fromkeys(group_of.values())):
        mine = [(name, p) for name, p in named if group_of.get(name) == group]
        lines = [*settings, *describe(mine, "parameter")]
        tensors = [local(p) for _, p in mine]
        if group is None:
            lines += describe(core.model.named_buffers(), "buffer")
            tensors += core.model.buffers()
        replicas = Replicas(core.engine if group is None else core.endpoint(group), wait)
        replicas.check_alike(lines)
        replicas.broadcast_tensors_(tensors, 0)
    core.meter.reset()  # what is counted is training
    core.engine_meter.reset()
