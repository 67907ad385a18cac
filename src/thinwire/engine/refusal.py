"""Steps that no worker makes, because the gradient of one of them is not finite."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from thinwire.engine.buckets import ParameterBucket, TrainingContext
from thinwire.engine.endpoint import Endpoint
from thinwire.engine.replicas import decode_names, encode_name
from thinwire.engine.sparse_rows import SparseRows
from thinwire.errors import NumericError
from thinwire.strategies.base import Strategy
from thinwire.wire.work import Work


@dataclass(frozen=True, slots=True)
class Refusal:
    """How all workers come to refuse a step together."""

    strategy: Strategy
    endpoint: Endpoint
    context: TrainingContext
    buckets: Sequence[ParameterBucket]
    rows: Sequence[SparseRows]
    has_groups: bool
    """Whether only some workers hold some of the buckets, and know that their gradients are refused."""

    @property
    def is_due(self) -> bool:
        """Whether gradients that this worker holds are refused."""
        return any(bucket.flat.refused for bucket in self.buckets) or any(rows.refused for rows in self.rows)

    def elsewhere(self) -> Generator[Work, None, bool]:
        """Whether some worker has gradients that are refused: where workers hold different parameters, not
        all know of it, and a step of only some would tear the model. Called by all after a reduction."""
        if not self.has_groups:
            return False
        refused = torch.tensor([any(bool(bucket.flat.refused) for bucket in self.buckets)], dtype=torch.uint8)
        work, everyones = self.endpoint.gather(refused)
        yield work
        return bool(everyones.any())

    def raising(self, *, asked_before: int = 0) -> Iterator[Work]:
        """Raise NumericError on all workers together, naming who has such a gradient; the step with it was
        asked for `asked_before` steps ago.

        Where replicas differ not all know of it: who has it raises alone, and the others are told of that
        as of any error.
        """
        lane, told = self.endpoint.lane, self._own_name()
        names = [""] * lane.rank + [told]
        only_some = self.has_groups and self.strategy.overlap == "forward"  # those that hold the bucket
        if not only_some and (self.strategy.replicas_agree or not told):
            work, everyones = self.endpoint.gather(encode_name(told))
            yield work
            names = decode_names(everyones)
        wrong = ", ".join(f"{name} on worker {rank}" for rank, name in enumerate(names) if name)
        raise NumericError(
            f"step {self.context.step - asked_before}: the gradient of {wrong or 'some parameter'} is not "
            "finite; no worker makes the step",
            hint="look at that worker's data, lower the learning rate or clip gradients; in float16, use "
            "torch.amp.GradScaler, which leaves such steps out",
        )

    def _own_name(self) -> str:
        """The first parameter of this worker with such a gradient, if any."""
        names = [bucket.not_finite for bucket in self.buckets] + [rows.not_finite for rows in self.rows]
        return next((name for name in names if name), "")
