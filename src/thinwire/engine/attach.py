"""attach: hang a strategy on a user's model and optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire.engine import claims, replicas
from thinwire.engine.buckets import ParameterBucket, make_buckets
from thinwire.engine.buffers import BufferPolicy
from thinwire.engine.companions import with_companions
from thinwire.engine.link import Link
from thinwire.errors import SettingError, UsageError, check, check_one_of
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Wire, Work
from thinwire.wire.process_group import connect
from thinwire.wire.threads import ThreadWorld

# By name: importing them only to compare would cost every user a second at the start.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}

TIMEOUT_S = 300.0
BUCKETS = 24
"""Of a model, unless its user says how large they are. Fewer leave more to wait for at the end of
backward (or the start of forward), more cost more messages and more of the processor."""
MOST_BUCKET_BYTES = 25 << 20
LEAST_BUCKET_BYTES = 1 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the wire starts early in backward."""
LEAST_FORWARD_MESSAGE_BYTES = 64 << 10
"""With overlap="forward", where the layers that are needed first come last, buckets may be smaller: a ring of
P workers sends a P-th of a bucket at a time, which is to be no less than this."""


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    *,
    process_group: dist.ProcessGroup | Wire | None = None,
    bucket_bytes: int | None = None,
    buffers: BufferPolicy = "rank0",
    timeout_s: float = TIMEOUT_S,
) -> Link:
    """Train `model` together with the other workers, the way `strategy` says.

    All workers call it with the same model; they start from rank 0's weights and buffers. Model,
    optimizer and their state dicts stay the user's own. Under torchrun the default process group
    is used, and started if nobody has; without torchrun it is a world of one, which sends nothing.

    Args:
        model: an ordinary module, not wrapped in DDP or FSDP; compiled is fine.
        optimizer: any torch.optim optimizer over the model's parameters.
        strategy: how the workers talk, such as `AllReduce()`.
        process_group: the workers to train with, if not all of them (or a `Wire`).
        bucket_bytes: gradients travel in pieces of about this size; by default a 24th of the model, but
            no more than 25 MiB and no less than 1 MiB (64 KiB per worker with `overlap="forward"`).
        buffers: batch-norm statistics after each step are "rank0"'s, their "average", or "local";
            under a strategy that lets replicas differ they are always local.
        timeout_s: how long to wait for a worker that is alive before giving up.

    >>> import torch, thinwire as tw
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tw.attach(model, optimizer, tw.AllReduce()) as link:
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> link.stats.steps, link.stats.sent_bytes
    (1, 0)
    """
    check_one_of("buffers", buffers, get_args(BufferPolicy))
    check(
        bucket_bytes is None or bucket_bytes > 0, "bucket_bytes", "a positive number of bytes", bucket_bytes
    )
    check(timeout_s > 0, "timeout_s", "a positive number of seconds", timeout_s)
    _check_strategy(strategy)
    _check_model(model)
    _check_optimizer(optimizer, model, strategy)
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        wire: Wire = connect(process_group, timeout_s) or ThreadWorld(1).wire(0)
    else:
        wire = process_group
    settings = {"strategy": repr(strategy), "bucket_bytes": str(bucket_bytes), "buffers": buffers}
    try:
        _start_alike(model, settings, wire, timeout_s)
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets, bucket_bytes = buckets_for(trainable, optimizer, strategy, wire.world_size, bucket_bytes)
        return Link(
            model,
            optimizer,
            strategy,
            wire,
            buckets,
            bucket_bytes=bucket_bytes,
            buffers=buffers,
            timeout_s=timeout_s,
        )
    except BaseException:
        wire.close()
        raise


def buckets_for(
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: Optimizer,
    strategy: Strategy,
    world_size: int,
    bucket_bytes: int | None,
) -> tuple[Sequence[ParameterBucket], int]:
    """The buckets of these parameters, and how large they were to be: as asked for, or as usual."""
    first_bytes = None
    if bucket_bytes is None:
        bucket_bytes = usual_bucket_bytes(sum(p.nbytes for _, p in named), strategy, world_size)
        first_bytes = FIRST_BUCKET_BYTES
    return with_companions(make_buckets(named, bucket_bytes, first_bytes), optimizer), bucket_bytes


def usual_bucket_bytes(model_bytes: int, strategy: Strategy, world_size: int) -> int:
    """What `attach` takes if nobody says how large buckets are."""
    # Not for others: state that a strategy keeps per bucket must fit when the number of workers changes.
    forward = strategy.overlap == "forward"
    least = LEAST_FORWARD_MESSAGE_BYTES * world_size if forward else LEAST_BUCKET_BYTES
    return min(max(model_bytes // BUCKETS, least), MOST_BUCKET_BYTES)


def _start_alike(model: nn.Module, settings: dict[str, str], wire: Wire, timeout_s: float) -> None:
    """Make sure that all workers have the same model and settings, and give them rank 0's weights."""

    def wait(work: Work) -> None:
        if not work.wait(timeout_s):
            raise wire.late(f"worker {wire.rank} has waited {timeout_s:g} s for the others to attach")

    replicas.check_alike(replicas.describe(model, settings), wire, wait)
    replicas.broadcast_tensors_([*model.parameters(), *model.buffers()], 0, wire, wait)


def _check_strategy(strategy: Strategy) -> None:
    if isinstance(strategy, type) or not hasattr(strategy, "rounds"):
        raise SettingError(
            f"strategy must be a strategy object, got {strategy!r}", hint="for example tw.AllReduce()"
        )


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wrappers = _WRAPPERS & {base.__name__ for base in type(module).__mro__}
        if wrappers:
            raise UsageError(
                f"{name or 'the model'} is already wrapped in {wrappers.pop()}",
                hint="attach the plain model: thinwire takes the place of that wrapper",
            )
    for name, parameter in model.named_parameters():
        if "DTensor" in {type(parameter).__name__, type(parameter.data).__name__}:
            raise UsageError(f"parameter {name} is a DTensor; thinwire trains plain replicas")
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingError("model has no parameter that requires a gradient")
    claims.check_free((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _check_optimizer(optimizer: Optimizer, model: nn.Module, strategy: Strategy) -> None:
    if not isinstance(optimizer, Optimizer):
        raise SettingError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(held - {id(p) for p in model.parameters()})
    if strange:
        raise SettingError(
            f"optimizer holds {strange} parameter(s) that are not in the model, so nobody would send them",
            hint="attach one module that holds all of them, for example an nn.ModuleList",
        )
    others = sum(p.requires_grad and id(p) not in held for p in model.parameters())
    if others and strategy.overlap == "forward":
        warnings.warn(
            f"{others} parameter(s) of the model require a gradient and are not in the optimizer; "
            "overlap='forward' leaves no gradient for another one (freeze them if nobody trains them)",
            stacklevel=3,
        )
