"""GossipGraD: after a step, parameters (or a share of them) go to one peer instead of to everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from thinwire.compress.payload import Payload, bits
from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy, step_scale
from thinwire.strategies.gossip.agreement import AGREE_EVERY, FIRST_SHARE, Agreement, Options, Pick
from thinwire.strategies.gossip.chunks import Chunks
from thinwire.strategies.gossip.encoding import Encoding, RoundingMemory
from thinwire.strategies.gossip.state import GossipRound, GossipRuntime, GossipState
from thinwire.strategies.measured import costs
from thinwire.strategies.parts import check_finite, check_real
from thinwire.strategies.settings import check_types
from thinwire.topology import Schedule, Topology
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, in_background, training_thread

Exchange = Literal["weights", "weights+momentum"]
_PAYLOADS: tuple[Payload, ...] = get_args(Payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipGraD(Strategy):
    """Average parameters with one peer per step; everyone hears of everyone in log2(P) steps.

    Worker i sends x_i to one peer and receives x_j from another while the next forward and backward run,
    and moves before its next update: x_i += (x_j - x_i) / 2. Every round is a permutation, so the mean over
    workers never moves; where P is a power of two, log2(P) rounds without updates give it exactly.

    Reference: Daily et al., GossipGraD, 2018, arXiv:1803.05880.
    """

    topology: Topology = "dissemination"
    """Who meets whom: "dissemination" (any number of workers) or "hypercube" (a power of two)."""
    rotate: int | None = 0
    """Seed of the random order in which workers change places every log2(P) rounds, so that everyone meets
    everyone; none: they never do."""
    exchange: Exchange = "weights"
    """What is averaged: "weights"; or "weights+momentum", with the optimizer's averages (two to three times
    the bytes)."""
    payload: Payload = "fp32"
    """How numbers look on the wire: "fp32" (as they are), "bf16" (half the bytes) or "int8" (a quarter). With
    share="auto", the finest that may be picked."""
    share: float | Literal["auto"] = 1.0
    """Part of the model that each round sends, in turn; "auto" picks payload and share so that the exchange
    fits behind the compute."""
    average_every: int = 0
    """Steps after which all workers take the mean of all; 0: never."""

    def __post_init__(self) -> None:
        check_types(self)
        valid = self.share == "auto" or 0 < self.share <= 1
        check(valid, "GossipGraD.share", "a number above 0 and at most 1, or 'auto'", self.share)
        check(self.average_every >= 0, "GossipGraD.average_every", "0 or more steps", self.average_every)

    @property
    def period(self) -> int:
        return max(1, self.average_every)

    @property
    def adapts_in(self) -> int:
        # At the first agreement all tell their measurements, at the second they agree on a pick, and at the
        # fourth on its effect.
        return 4 * AGREE_EVERY if self.share == "auto" else 0

    def rate_scale(self, state: GossipState, world_size: int, normalised: bool) -> float:
        return step_scale(world_size, normalised, 1 / state.share)

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> GossipState:
        check_real(buckets, "GossipGraD")
        chunks = Chunks([bucket.num_parameters for bucket in buckets])
        momenta = len(buckets[0].optimizer_state) if self.exchange == "weights+momentum" else 0
        rule = "'weights' with an optimizer that keeps no momentum"
        hint = "SGD and RMSprop with momentum, Adam, AdamW, NAdam, RAdam and Adamax keep some"
        possible = momenta > 0 or self.exchange == "weights"
        check(possible, "GossipGraD.exchange", rule, self.exchange, hint=hint)
        runtime = GossipRuntime(Schedule(self.topology, wire.world_size, self.rotate), chunks, momenta)
        if self.share == "auto":
            pick = Pick(_PAYLOADS[-1], chunks.count(FIRST_SHARE))
            runtime.agreement = Agreement(self._options(buckets, len(chunks), momenta))
        else:
            pick = Pick(self.payload, chunks.count(self.share))
        memory = RoundingMemory([], [])
        if pick.payload == "int8":
            memory.references = [
                b.keep("reference", b.read(), on_resize="same", of_parameters=True) for b in buckets
            ]
            memory.errors = [b.keep("rounding error", b.read().zero_(), on_resize="reset") for b in buckets]
        state = GossipState(memory, pick.payload, pick.num_chunks)
        state.runtime = runtime
        return state

    def _options(self, buckets: Sequence[Bucket], num_chunks: int, momenta: int) -> Options:
        def num_bytes(bucket: Bucket, payload: Payload) -> int:
            spans = [(0, bucket.num_parameters)]
            return Encoding(spans, bucket.gradient.element_size(), payload, momenta).num_bytes

        allowed = _PAYLOADS[_PAYLOADS.index(self.payload) :]
        return Options({p: sum(num_bytes(b, p) for b in buckets) for p in allowed}, num_chunks)

    async def mix(self, bucket: Bucket, state: GossipState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        averages = self.average_every > 0 and bucket.step % self.average_every == 0
        if bucket.index == 0:
            state.ready = Work()
            await self._begin(bucket.step, state, wire, averages=averages)
            state.ready.finish()
        await state.ready
        if averages:
            await self._average(bucket, state, wire)
        elif state.round is not None:
            await self._swap(bucket, state, state.round, wire)

    async def _begin(self, step: int, state: GossipState, wire: Wire, *, averages: bool) -> None:
        """Decide which chunks the round sends to whom."""
        agreement = state.runtime.agreement
        if agreement is not None and step % AGREE_EVERY == 0:
            await agreement.gathering
            pick, state.caution = agreement.decide(Pick(state.payload, state.num_chunks), state.caution, wire)
            state.payload, state.num_chunks = pick.payload, pick.num_chunks
            agreement.gather(state.runtime.timer.measure(), wire)
        if not averages:
            state.round = state.next_round(wire.rank, step)
            state.runtime.timer.begin(wire.now())

    async def _swap(self, bucket: Bucket, state: GossipState, round: GossipRound, wire: Wire) -> None:
        """Send a part of a bucket to one peer and move half way towards what another has sent.

        Half the difference of what was received and what was sent, both as they looked on the wire: what one
        worker gains another loses, so the mean stays whatever the payload has rounded away.
        """
        spans = round.window.spans.get(bucket.index)
        if spans is None:
            return
        values, timer = state.values(bucket), state.runtime.timer
        await in_background()
        encoding = Encoding(spans, bucket.gradient.element_size(), round.payload, len(values) - 1)
        # nothing changes them before this has come back
        if not bucket.is_finite():
            check_finite(bucket.read(), bucket)
        own = [values[part.value].read_span(part.start, part.stop) for part in encoding.parts]
        message, sent = encoding.write(bucket.index, own, state.memory)
        inbox = message.new_empty(message.shape)
        to, source = round.peers
        await wire.exchange(send=message, to=to, recv=inbox, source=source, tag=bucket.index)
        timer.arrived(wire.now(), encoding.num_bytes)
        received = encoding.read(bucket.index, inbox, sent, state.memory)
        changes = [theirs - ours for theirs, ours in zip(received, sent, strict=True)]
        state.sample(round, changes[: len(spans)], sent[: len(spans)])
        waited_s = await training_thread()
        for part, change in zip(encoding.parts, changes, strict=True):
            values[part.value].add_span_(part.start, change, scale=0.5)
        timer.waited(waited_s)
        if state.came_back(round, waited_s):
            timer.end(wire.now())

    async def _average(self, bucket: Bucket, state: GossipState, wire: Wire) -> None:
        """Overwrite a bucket with the mean of all workers, which becomes their common reference."""
        values = state.values(bucket)
        means = [value.read() for value in values]
        await in_background()
        check_finite(means[0], bucket)
        for work in [wire.all_reduce_(mean) for mean in means]:
            await work
        for mean in means:
            mean.div_(wire.world_size)
        await training_thread()
        for value, mean in zip(values, means, strict=True):
            value.write_(mean)
        if state.memory.references:
            state.memory.references[bucket.index].copy_(means[0])
        if state.memory.errors:
            state.memory.errors[bucket.index].zero_()

    async def settle(self, buckets: Sequence[Bucket], state: GossipState, wire: Wire) -> None:
        if state.runtime.agreement is not None:
            await state.runtime.agreement.gathering

    def advice(self, num_steps: int | None, world_size: int) -> str:
        part = costs("gossip-grad", world_size, exchange="weights", share=0.1)
        if self.share == 1 or part is None:
            return ""
        whole = costs("gossip-grad", part.workers, exchange="weights", share=1.0)
        beside = "" if whole is None else f", all of it {whole.loss:.1f}"
        short = costs("gossip-grad", world_size, short=True, exchange="weights", share=0.1)
        if short is not None and short.loss > part.loss:
            beside += f", a tenth in {short.steps:,} steps {short.loss:.1f} ({short.recipe})"
        return (
            f"GossipGraD with share={self.share!r} may send a small part of the model; a tenth of it cost "
            f"{part.loss:.1f} points of accuracy with {part.workers} workers ({part.recipe}, {part.epochs} "
            f"epochs){beside}, and more on some networks; see docs/gossip_grad.md, 'What it costs in "
            "accuracy', and docs/which.md"
        )

    def instruments(self, state: GossipState) -> Mapping[str, float]:
        return {
            "share": state.share,
            "payload_bits": bits(state.payload),
            "late_rounds": state.late_rounds,
            "consensus_distance": state.distance,
        }
