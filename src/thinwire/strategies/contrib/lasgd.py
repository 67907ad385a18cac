"""LASGD: models, by an all-reduce that goes on beside training; each worker makes as many steps as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.parts import check_finite
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, all_of, any_of


@dataclass(slots=True)
class LASGDState:
    """One worker's state; lists are in the order of buckets."""

    rounds: int = 0
    """All-reduces that this worker took part in."""
    own_steps: int = 0
    """Steps that it has made in the meantime."""
    likes: list[Tensor] = field(init=False, repr=False)
    """Tensors of the size and kind of each bucket."""
    sent: list[Tensor | None] = field(init=False, repr=False)
    """What was handed in for a round."""
    means: list[Tensor | None] = field(init=False, repr=False)
    """What has come back, and was not folded in yet."""
    full: Work = field(init=False, repr=False, default_factory=Work)
    """Ends when all buckets were handed in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LASGD(Strategy):
    """Average models all the time, one all-reduce after another, while each worker trains at its own pace.

    A worker hands in its model after the step in which the last mean came, and goes on training. When all
    have handed in, x += mean - what it had handed in: steps made meanwhile stay. A fast worker makes more
    steps between two rounds than a slow one, and waits for nobody.

    Reference: Avidor and Tal-Israel, Locally Asynchronous Stochastic Gradient Descent for Decentralised Deep
    Learning, 2022, arXiv:2203.13085. The rule is reconstructed from its abstract.
    """

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LASGDState:
        state = LASGDState()
        state.likes = [bucket.gradient[: bucket.num_parameters] for bucket in buckets]
        state.sent, state.means = [None] * len(buckets), [None] * len(buckets)
        return state

    async def mix(self, bucket: Bucket, state: LASGDState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        index = bucket.index
        state.own_steps += index == 0
        now = check_finite(bucket.read(), bucket)
        if (mean := state.means[index]) is not None:
            self._fold_in(bucket, mean, state)
            now = bucket.read()
        if state.sent[index] is None:
            state.sent[index] = now
            # a mean that has come for some buckets only is folded into the others in the next step
            if all(sent is not None for sent in state.sent) and not any(m is not None for m in state.means):
                state.full.finish()

    def _fold_in(self, bucket: Bucket, mean: Tensor, state: LASGDState) -> None:
        sent = state.sent[bucket.index]
        assert sent is not None, "a mean answers what was handed in"
        bucket.add_(mean - sent)
        state.means[bucket.index] = state.sent[bucket.index] = None

    async def serve(self, state: LASGDState, wire: Wire) -> None:
        taking_part = float(wire.world_size > 1)
        while taking_part:
            await any_of([state.full, wire.pausing])
            handed_in = state.full.done()
            count = torch.tensor([float(handed_in)])
            totals = [
                sent.clone() if handed_in and sent is not None else torch.zeros_like(like)
                for sent, like in zip(state.sent, state.likes, strict=True)
            ]
            await all_of([wire.all_reduce_(data) for data in (count, *totals)])
            taking_part = float(count)
            if handed_in:
                state.rounds += 1
                state.full = Work()
                state.means[:] = [total.div_(taking_part) for total in totals]

    async def settle(self, buckets: Sequence[Bucket], state: LASGDState, wire: Wire) -> None:
        for bucket in buckets:
            if (mean := state.means[bucket.index]) is not None:
                self._fold_in(bucket, mean, state)
            state.sent[bucket.index] = None  # handed in for a round that is not held any more
        state.full = Work()

    def instruments(self, state: LASGDState) -> Mapping[str, float]:
        return {"rounds": state.rounds, "steps_per_round": state.own_steps / max(1, state.rounds)}
