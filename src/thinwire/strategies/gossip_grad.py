"""GossipGraD: after a step, parameters (or a share of them) go to one peer instead of to everybody."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from thinwire.compress.sizes import Payload, bits
from thinwire.errors import SettingError, check, check_one_of
from thinwire.strategies.base import Bucket, Gradients, Parameters, Seam, Strategy
from thinwire.strategies.gossip import mail, push_sum
from thinwire.strategies.gossip.auto import FIRST_SHARE, MEET_EVERY, Meetings, Menu, Pick
from thinwire.strategies.gossip.cells import Cells, Place
from thinwire.strategies.gossip.letter import Layout, Memory
from thinwire.strategies.gossip.state import GossipState, Settled, resized
from thinwire.strategies.gossip.swap import average, swap
from thinwire.topology import Schedule, Topology
from thinwire.traffic import Cluster, Round, Sizes
from thinwire.wire.base import Wire, Work, take_off

Exchange = Literal["weights", "weights+momentum", "gradients"]
_PAYLOADS: tuple[Payload, ...] = get_args(Payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipGraD(Strategy):
    """Average parameters with one peer per step; everyone hears of everyone in log2(P) steps.

    Worker i sends x_i to one peer and receives x_j from another while the next forward and backward run,
    and moves before its next update: x_i += (x_j - x_i) / 2. Every round is a permutation, so the mean over
    workers never moves; where P is a power of two, log2(P) rounds without updates give it exactly.

    Reference: Daily et al., GossipGraD, 2018, arXiv:1803.05880; with `asynchronous`, push-sum as in Assran
    et al., Stochastic Gradient Push, 2019, arXiv:1811.10792.
    """

    topology: Topology = "dissemination"
    """Who meets whom: "dissemination" (any number of workers) or "hypercube" (a power of two)."""
    rotate: int | None = 0
    """Seed of the random order in which workers change places every log2(P) rounds, so that everyone meets
    everyone; none: they never do."""
    exchange: Exchange = "weights"
    """What is averaged: "weights"; "weights+momentum", with what the optimizer keeps of them (two to three
    times the bytes); or "gradients", in backward, which needs `average_every`."""
    payload: Payload = "fp32"
    """How numbers look on the wire: "fp32" (as they are), "bf16" (half the bytes) or "int8" (a quarter). With
    share="auto", the finest that may be picked."""
    share: float | Literal["auto"] = 1.0
    """Part of the model that each round sends, in turn; "auto" picks payload and share so that the exchange
    fits behind the compute."""
    asynchronous: bool = False
    """Nobody waits for a late peer: messages are taken from whoever sends, and weighted by push-sum."""
    average_every: int = 0
    """Steps after which all workers take the mean of all; 0: never."""

    def __post_init__(self) -> None:
        check_one_of("GossipGraD.topology", self.topology, get_args(Topology))
        check_one_of("GossipGraD.exchange", self.exchange, get_args(Exchange))
        check_one_of("GossipGraD.payload", self.payload, _PAYLOADS)
        number = isinstance(self.share, int | float) and 0 < self.share <= 1
        check(
            number or self.share == "auto",
            "GossipGraD.share",
            "a number above 0 and at most 1, or 'auto'",
            self.share,
        )
        check(self.average_every >= 0, "GossipGraD.average_every", "0 or more steps", self.average_every)
        if self.exchange == "gradients":
            self._check_gradients()
        if self.asynchronous:
            self._check_asynchronous()

    def _check_gradients(self) -> None:
        given = "with exchange='gradients'"
        check(
            self.average_every > 0,
            "GossipGraD.average_every",
            f"at least 1 {given}",
            self.average_every,
            hint="gossip over gradients alone never brings the workers' models together",
        )
        check(self.payload == "fp32", "GossipGraD.payload", f"'fp32' {given}", self.payload)
        check(self.share == 1, "GossipGraD.share", f"1 {given}", self.share)
        check(not self.asynchronous, "GossipGraD.asynchronous", f"False {given}", True)

    def _check_asynchronous(self) -> None:
        given = "with asynchronous=True"
        check(
            self.average_every == 0,
            "GossipGraD.average_every",
            f"0 {given}",
            self.average_every,
            hint="a mean of all has everybody wait for the slowest; push-sum needs none",
        )
        check(
            self.share != "auto",
            "GossipGraD.share",
            f"a number {given}",
            self.share,
            hint="a worker whose last message is still on its way skips a round, so it always fits",
        )

    @property
    def seams(self) -> frozenset[Seam]:
        if self.exchange == "gradients":
            return frozenset(("reduce", "mix"))
        if self.asynchronous:
            return frozenset(("mix", "serve", "settle"))
        return frozenset(("mix", "settle")) if self.share == "auto" else frozenset(("mix",))

    @property
    def adapts_in(self) -> int:
        # At the first meeting all tell what they measured, at the second they agree on what fits, and at the
        # fourth on what it came to.
        return 4 * MEET_EVERY if self.share == "auto" else 0

    # -- making the state ---------------------------------------------------------------------------

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> GossipState:
        cells = Cells([bucket.num_parameters for bucket in buckets])
        fixed = Settled(
            schedule=Schedule(self.topology, wire.world_size, self.rotate),
            cells=cells,
            momenta=self._momenta(len(buckets[0].companions)),
            lane=wire.lane("gossip"),
        )
        if self.share == "auto":
            pick = Pick(_PAYLOADS[-1], cells.count(FIRST_SHARE))
            sizes = [(b.num_parameters, b.read().element_size()) for b in buckets]
            fixed.meetings = Meetings(self._menu(cells, sizes, len(buckets[0].companions)), fixed.lane)
        else:
            pick = Pick(self.payload, cells.count(self.share))
        references = [bucket.read() for bucket in buckets] if pick.payload == "int8" else []
        # What push-sum rounds away stays in the parameters, so it needs no place of its own.
        errors = [] if self.asynchronous else [each.new_zeros(each.shape) for each in references]
        state = GossipState(Memory(references, errors), pick.payload, pick.num_cells)
        state.fixed = fixed
        if self.asynchronous:
            state.masses = [1.0] * len(cells)
            fixed.mail = mail.Mail(buckets, wire.world_size)
        return state

    def _momenta(self, kept: int) -> int:
        """Companions that travel along, of those the optimizer keeps."""
        if self.exchange != "weights+momentum":
            return 0
        if kept == 0:
            raise SettingError(
                "GossipGraD.exchange must be 'weights' or 'gradients' with an optimizer that keeps no "
                "momentum, got 'weights+momentum'",
                hint="SGD and RMSprop with momentum, Adam, AdamW, NAdam, RAdam and Adamax keep some",
            )
        return kept

    def _menu(self, cells: Cells, sizes: Sequence[tuple[int, int]], kept: int) -> Menu:
        allowed = _PAYLOADS[_PAYLOADS.index(self.payload) :]
        momenta = self._momenta(kept)

        def model_bytes(payload: Payload) -> int:
            return sum(
                Layout([(0, numel)], itemsize, payload, momenta).num_bytes for numel, itemsize in sizes
            )

        return Menu({payload: model_bytes(payload) for payload in allowed}, len(cells))

    # -- training -----------------------------------------------------------------------------------

    async def reduce(self, bucket: Gradients, state: GossipState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        to, source = state.fixed.schedule.peers(wire.rank, state.steps)
        inbox = bucket.gradient.new_empty(bucket.gradient.shape)
        await take_off()
        await wire.exchange(send=bucket.gradient, to=to, recv=inbox, source=source, tag=bucket.index)
        bucket.gradient.add_(inbox).div_(2)

    async def mix(self, bucket: Parameters, state: GossipState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        if self.asynchronous:
            await push_sum.push(bucket, state, wire)
            return
        if bucket.index == 0:
            state.ready = Work()
            await self._begin(state, wire)
            state.ready.finish()
        await state.ready
        if self._averages(state.steps):
            await average(bucket, state)
        elif state.turn is not None:
            await swap(bucket, state, state.turn, wire)

    async def _begin(self, state: GossipState, wire: Wire) -> None:
        """A round is launched: what goes where."""
        state.steps += 1
        meetings = state.fixed.meetings
        if meetings is not None and state.steps % MEET_EVERY == 0:
            if meetings.gathering is not None:
                await meetings.gathering
            pick, state.caution = meetings.decide(Pick(state.payload, state.num_cells), state.caution)
            state.payload, state.num_cells = pick.payload, pick.num_cells
            meetings.gather(state.fixed.gauge.report())
        if self.exchange != "gradients" and not self._averages(state.steps):
            state.turn = state.next_turn(wire.rank)
            state.fixed.gauge.begin(wire.now())

    def _averages(self, steps: int) -> bool:
        return self.average_every > 0 and steps % self.average_every == 0

    async def serve(self, state: GossipState, wire: Wire) -> None:
        await mail.serve(state, wire)

    async def settle(self, buckets: Sequence[Parameters], state: GossipState, wire: Wire) -> None:
        meetings = state.fixed.meetings
        if self.asynchronous:
            await push_sum.drain(buckets, state, wire)
        elif meetings is not None and meetings.gathering is not None:
            await meetings.gathering

    # -- what it says of itself ---------------------------------------------------------------------

    def rounds(self, sizes: Sizes, cluster: Cluster, step: int = 0) -> Iterable[Round]:
        """With share="auto" those of the finest payload and the whole model, which it sends at most; with
        `asynchronous`, those of a worker that skips none."""
        momenta = self._momenta(sizes.momenta)
        if self.exchange == "gradients":
            for num_bytes in sizes.bucket_bytes():
                yield Round(op="exchange", send_bytes=num_bytes, recv_bytes=num_bytes)
        if self._averages(step + 1):
            for numel, itemsize in sizes.parameters:
                yield from [Round(op="all_reduce", send_bytes=numel * itemsize)] * (1 + momenta)
        elif self.exchange != "gradients":
            cells = Cells([numel for numel, _ in sizes.parameters])
            if self.asynchronous:
                head = mail.head_bytes(len(cells))
                yield Round(op="exchange", send_bytes=head, recv_bytes=head)
            count, place = cells.count(1.0 if self.share == "auto" else self.share), Place()
            for _ in range(step - (step // self.average_every if self.average_every else 0)):
                place.advance(count, len(cells))
            for bucket, spans in cells.window(place, count).spans.items():
                num_bytes = Layout(spans, sizes.parameters[bucket][1], self.payload, momenta).num_bytes
                yield Round(op="exchange", send_bytes=num_bytes, recv_bytes=num_bytes)

    def instruments(self, state: GossipState) -> Mapping[str, float]:
        if self.exchange == "gradients":
            return {}
        told = {"share": state.share, "payload_bits": bits(state.payload), "late_rounds": state.late_rounds}
        if self.asynchronous:
            told |= {
                "skipped_rounds": state.skipped_rounds,
                "mass": math.fsum(state.masses) / len(state.masses),
            }
        return told | {"consensus_distance": state.distance}

    def resize(self, saved: Sequence[Any], rank: int, world_size: int) -> Any:
        return resized(saved, rank)
