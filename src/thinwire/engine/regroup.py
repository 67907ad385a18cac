"""Going on when the workers have changed: a new lane, and everybody at the same place of the training.

Who has come furthest gives: the strategy's state that all have in common, and the place in the data. Whoever
joins also takes its model and optimizer. So does whoever is behind where replicas agree, or had missed a
round that others have finished. Nothing is changed before all of it has arrived; if another worker is lost
meanwhile, all begin again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.elastic.sampler import ElasticSampler
from thinwire.elastic.world import World
from thinwire.engine.buckets import local
from thinwire.engine.common_calls import CommonCalls
from thinwire.engine.core import Core
from thinwire.engine.parts import Part
from thinwire.engine.replicas import Replicas, describe
from thinwire.engine.standing import Standing, batches_done, check_joiners, giver_of
from thinwire.engine.transport import Transport
from thinwire.errors import PeerError, PeerLost
from thinwire.strategies.base import overrides
from thinwire.wire.base import Lane

_log = logging.getLogger("thinwire")


@dataclass(slots=True)
class Place:
    """Where one worker is in the training."""

    state: dict[str, Any]
    """The strategy's state, as it is saved."""
    shared: str
    """Digest of the part of it that is the same on all workers."""
    num_residuals: int
    """How many of its numbers only this worker has."""

    @classmethod
    def of(cls, core: Core) -> Place:
        digest, own = hashlib.sha256(), 0
        recovers = overrides(core.strategy, "recover")  # then it sees to that itself
        for bucket in core.buckets:
            bucket.undo_()
            for name, leaf in sorted(bucket.leaves.items()):
                if leaf.on_resize == "same" and not recovers:
                    digest.update(name.encode() + leaf.data.detach().cpu().contiguous().numpy().tobytes())
                elif leaf.on_resize == "sum":
                    own += leaf.data.numel()
        return cls(core.state_dict(), digest.hexdigest(), own)


@dataclass(slots=True)
class Regrouper:
    """What an elastic link keeps from one generation to the next."""

    world: World
    make_core: Callable[[Lane, Transport], Core]
    settings: Sequence[str]
    """Lines that must be the same on all workers."""
    timeout_s: float
    parts: dict[str, Part] = field(default_factory=dict)
    """What else whoever joins is given, by name."""
    waiting: dict[str, Any] = field(default_factory=dict)
    """States of parts that have been received and not been asked for."""
    sampler: ElasticSampler | None = None
    calls: CommonCalls = field(default_factory=CommonCalls)
    since: int = 0
    """Steps done when the present share of samples was dealt."""
    synced: int = 0
    completed: bool = False
    """Whether others had made the step that this worker was in when the workers last changed, so that its
    batch counts as trained on."""
    _id: str = ""
    """As which this worker has last trained."""
    _rank: int = 0
    _known: list[int] = field(default_factory=list)
    _num_workers: int = 0
    _done: list[int] = field(default_factory=list)
    """Batches that each worker of the generation before has done of its share, as all have agreed."""

    def form(self, place: Place | None, known: Sequence[int] = ()) -> tuple[Core, Transport]:
        """Join the others in the next generation that lasts; without a place, this worker is new."""
        began_s = time.monotonic()
        self._known, self.completed = list(known), False
        while True:
            try:
                lane = self.world.connect()
            except BaseException:
                self.world.leave()  # else it would be a member that lives, and never trains
                raise
            transport = Transport(lane, self.timeout_s)
            core = None
            try:
                core = self.make_core(lane, transport)
                everyone = Replicas(core.outside, transport.wait)
                place = self._meet(core, everyone, place)
                everyone.meet("the end of regrouping")
                self._tell(core, began_s)
                return core, transport
            except PeerLost as error:
                self.end(core, transport, error)
            except BaseException:
                self.end(core, transport, PeerLost("this worker leaves"))
                self.world.leave()
                raise

    def end(self, core: Core | None, transport: Transport, error: PeerError) -> None:
        """Give up a generation."""
        transport.stop()
        if core is not None:
            core.abandon()
        self.world.drop(error)

    # -- what is exchanged ------------------------------------------------------------------------------

    def _meet(self, core: Core, everyone: Replicas, place: Place | None) -> Place:
        standings = self._gather(core, everyone, place)
        if all(each.new for each in standings):
            self._start_alike(core, everyone)
            return self._commit(core, 0)
        check_joiners(standings, self.world.me.id)
        giver = giver_of(standings)
        source, mine = standings.index(giver), standings[core.lane.rank]
        agree = core.strategy.replicas_agree
        behind = [each.is_behind(giver, agree=agree) for each in standings]
        package = self._package(core, place, full=any(behind)) if mine is giver else None
        package = everyone.broadcast_state(package, source)
        assert isinstance(package, dict)
        if behind[core.lane.rank]:
            _adopt_model(core, package)
            for name, state in package["parts"].items():
                if name in self.parts:
                    self.parts[name].load_state_dict(state)
                else:
                    self.waiting[name] = state
        core.take_over(
            None if place is None else place.state, package["strategy"], joins=behind[core.lane.rank]
        )
        core.wait_for(core.recovering())
        if mine.new or mine.calls < giver.calls:
            self.calls.adopt(package["calls"])
        self.calls.mixed = any(each.new or each.mixed for each in standings)
        if package["sampler"] is not None:
            self._deal(package["sampler"], batches_done(standings, giver, agree=agree))
        # that stays so if this generation ends before all have come to the common place
        self.completed = not mine.new and (self.completed or mine.is_completed_by(giver, agree=agree))
        return self._commit(core, giver.steps)

    def _gather(self, core: Core, everyone: Replicas, place: Place | None) -> list[Standing]:
        steps = -1 if place is None else int(place.state["steps"])
        epoch, taken = (0, 0) if self.sampler is None else (self.sampler.epoch, self.sampler.taken)
        lines = [*self.settings, *describe(core.model.named_parameters(), "parameter")]
        alike = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        shared = "" if place is None else place.shared
        # one that was left out and comes back is new, whatever it still holds
        new = place is None or self.world.me.id != self._id
        mine: list[Any] = [self.world.me.id, new, self.synced, self._rank, steps, epoch, taken]
        calls = [self.calls.done, self.calls.averaged, self.calls.mixed]
        sampler = self.sampler
        batch_size = 0 if sampler is None or sampler.fixed == "worker" else sampler.batch_size
        told = everyone.gather_objects([*mine, self._known, self.since, shared, alike, *calls, batch_size])
        return [Standing(*each) for each in told]

    def _package(self, core: Core, place: Place | None, *, full: bool) -> dict[str, Any]:
        assert place is not None, "who gives is not new"
        sampler = None if self.sampler is None else self.sampler.state_dict()
        strategy = place.state if full else {**place.state, "leaves": {}}
        package: dict[str, Any] = {"strategy": strategy, "sampler": sampler, "calls": self.calls.state()}
        if full:
            package["model"] = [local(t).detach() for t in _model_tensors(core)]
            package["optimizers"] = [optimizer.state_dict() for optimizer in core.optimizers]
            package["parts"] = {name: part.state_dict() for name, part in self.parts.items()}
        return package

    def _start_alike(self, core: Core, everyone: Replicas) -> None:
        named = core.model.named_parameters(), core.model.named_buffers()
        everyone.check_alike(
            [*self.settings, *describe(named[0], "parameter"), *describe(named[1], "buffer")]
        )
        everyone.broadcast_tensors_(_model_tensors(core), 0)
        core.restart()

    def _deal(self, state: dict[str, Any], done: list[int]) -> None:
        """Deal out the samples that are left, now that all know how many batches each worker has done."""
        self._done = done
        if self.sampler is None:
            self.waiting["sampler"] = {**state, "done": done}
        else:
            self.sampler.load_state_dict(state)
            self.sampler.account(done)

    def _commit(self, core: Core, steps: int) -> Place:
        """From here on this worker is at the common place, whatever becomes of this generation."""
        core.steps = self.since = steps
        self.synced, self._rank, self._id = self.world.generation, core.lane.rank, self.world.me.id
        self._known = [steps] * core.lane.world_size
        self.world.journal.note(
            "trains",
            generation=self.synced,
            id=self._id,
            rank=core.lane.rank,
            world_size=core.lane.world_size,
            steps=steps,
            epoch=None if self.sampler is None else self.sampler.epoch,
            lineage="" if self.world.membership is None else self.world.membership.lineage,
            agrees=core.strategy.replicas_agree,
            done=self._done,
        )
        if self.sampler is not None:
            self.sampler.place(core.lane.rank, core.lane.world_size)
        return Place.of(core)

    def _tell(self, core: Core, began_s: float) -> None:
        size, before = core.lane.world_size, self._num_workers
        self._num_workers = size
        if before and core.lane.rank == 0:
            lost = Place.of(core).num_residuals * max(0, before - size)
            also = f"; {lost:,} numbers of residuals went with them" if lost else ""
            _log.warning(
                "generation %d: %d workers go on from step %d after %.2f s, %d were there before%s",
                self.synced,
                size,
                core.steps,
                time.monotonic() - began_s,
                before,
                also,
            )

    # -- what users register ----------------------------------------------------------------------------

    def add_part(self, name: str, part: Part) -> None:
        self.parts[name] = part
        if name in self.waiting:
            part.load_state_dict(self.waiting.pop(name))

    def add_sampler(self, sampler: ElasticSampler, rank: int, world_size: int) -> None:
        if (state := self.waiting.pop("sampler", None)) is not None:
            sampler.load_state_dict(state)
            sampler.account(state["done"])
        sampler.place(rank, world_size)
        self.sampler = sampler


def _model_tensors(core: Core) -> list[Tensor]:
    return [*core.model.parameters(), *core.model.buffers()]


@torch.no_grad()
def _adopt_model(core: Core, package: dict[str, Any]) -> None:
    for mine, theirs in zip(_model_tensors(core), package["model"], strict=True):
        mine.copy_(theirs)
    for optimizer, state in zip(core.optimizers, package["optimizers"], strict=True):
        optimizer.load_state_dict(state)


def digest_of(model: nn.Module) -> str:
    """A digest of a model's parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(
            local(parameter).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:16]
