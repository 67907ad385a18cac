"""A model is cut into buckets: what an optimizer's parameters are sent in."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.engine.bucket_plan import make_buckets
from thinwire.engine.buckets import ParameterBucket, local
from thinwire.engine.core import Core
from thinwire.engine.optimizer import give_optimizer_state
from thinwire.engine.replica_group import Ranks
from thinwire.engine.sparse_rows import SparseRows, sparse_parameters
from thinwire.errors import UsageError
from thinwire.strategies.base import Strategy, overrides

MOST_BUCKET_BYTES = 25 << 20
LEAST_BUCKET_BYTES = 256 << 10
"""A bucket costs each worker half a millisecond of its processor, whatever its size. Where a handful of
buckets of twice the size hold the model, that is more than finer ones hide."""
LEAST_MESSAGE_BYTES = 64 << 10
"""A ring of P workers sends a P-th of a bucket at a time, which is to be no less than this."""


def cut(core: Core, group_of: Mapping[str, Ranks], bucket_bytes: int | None) -> None:
    """Cut the model into buckets, as asked for or by default, and have the core start anew with them."""
    named = [(name, p) for name, p in core.model.named_parameters() if p.requires_grad]
    sparse = sparse_parameters(core.model) if overrides(core.strategy, "reduce") else set()
    rows = [SparseRows(name, p) for name, p in named if name in sparse]
    if rows and core.strategy.overlap == "forward":
        raise UsageError(
            f"overlap='forward' cannot send sparse gradients, as {rows[0].name} has",
            hint="use AllReduce(overlap='backward'), or make the embedding with sparse=False",
        )
    named = [(name, p) for name, p in named if name not in sparse]
    place = {name: index for index, (name, _) in enumerate(named)}
    buckets, piece_bytes = list[ParameterBucket](), 0
    # One group at a time: all that hold the same parameters cut them alike, whatever else each of them holds.
    groups = dict.fromkeys(group_of.get(name) for name in place)
    for group in groups:
        mine = [(name, p) for name, p in named if group_of.get(name) == group]
        group_bytes = sum(local(p).nbytes for _, p in mine)
        size = bucket_bytes or default_bucket_bytes(group_bytes, core.strategy, core.lane.world_size)
        buckets += make_buckets(mine, size, 0 if bucket_bytes else size // 4, context=core.context)
        piece_bytes = size if group is None or not piece_bytes else piece_bytes
    if len(groups) > 1:
        buckets.sort(key=lambda bucket: -max(place[name] for name in bucket.names))
    for number, bucket in enumerate(buckets):
        bucket.place = number
    give_optimizer_state(buckets, core.optimizers)
    core.assemble(buckets, [group_of.get(bucket.names[0]) for bucket in buckets], piece_bytes, rows)


def default_bucket_bytes(model_bytes: int, strategy: Strategy, world_size: int) -> int:
    """Fewer buckets leave more to wait for at the end of backward, more cost more messages."""
    few = model_bytes <= 8 * LEAST_BUCKET_BYTES
    least = max((1 + few) * LEAST_BUCKET_BYTES, LEAST_MESSAGE_BYTES * world_size)
    return min(max(model_bytes // strategy.num_buckets, least), MOST_BUCKET_BYTES)
