"""The loop of an elastic training: steps that are done again when the workers change in their middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from thinwire.engine.caller import Caller
from thinwire.engine.regroup import Regrouper
from thinwire.errors import PeerLost, UsageError

if TYPE_CHECKING:
    from thinwire.engine.link import Link


class ElasticLoop:
    """The epochs of an elastic link and the steps in them, wherever this worker is in them."""

    def __init__(self, link: Link, regrouper: Regrouper, caller: Caller, regroup: Callable[[], None]) -> None:
        """`regroup`: go on with the workers that are left or have come."""
        if (sampler := regrouper.sampler) is None:
            raise UsageError("there is no sampler", hint="make one with link.sampler(...) before the loop")
        self.link, self.sampler, self.regroup = link, sampler, regroup
        self.caller, self.journal = caller, regrouper.world.journal
        self._regrouper = regrouper

    @property
    def completed(self) -> bool:
        """Whether others had made the step that this worker was in when the workers last changed."""
        return self._regrouper.completed

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs that are left; whoever joins begins with the present one."""
        sampler = self.sampler
        while sampler.epoch < num_epochs:
            epoch = sampler.epoch
            yield epoch
            if sampler.epoch == epoch:  # the loop over steps was left early, or there was none
                self._finish_epoch()

    def steps(self, loader: Iterable[Any]) -> Iterator[Step]:
        """The steps of this epoch that are left, until all workers are through with it."""
        link, sampler = self.link, self.sampler
        epoch = sampler.epoch
        while sampler.epoch == epoch:
            if not len(sampler):
                if self._comes_to_end():
                    break
                continue  # what a lost worker has left undone may have been dealt out
            generation = link.generation
            for batch in loader:
                if not self._begins_step():
                    break
                step = Step(self, batch)
                yield step
                if not step.entered:
                    raise UsageError("a step was not entered", hint="write `with step as batch:` in the loop")
                if link.generation != generation:
                    break  # what the loader has read ahead belongs to others now
        if sampler.epoch == epoch:
            self._finish_epoch()

    def _comes_to_end(self) -> bool:
        """Wait for all workers; False if they have changed meanwhile, so that there may be more to do."""
        try:
            self.caller.line_up()
            self.caller.everyone.meet("the end of an epoch")
        except PeerLost:
            self.regroup()
            return False
        return True

    def _begins_step(self) -> bool:
        """Be in the loop with all others; False if the workers have changed meanwhile."""
        try:
            self.caller.line_up()
        except PeerLost:
            self.regroup()
            return False
        return True

    def _finish_epoch(self) -> None:
        finished = self.sampler.epoch
        self.sampler.next_epoch()
        self.journal.note(
            "epoch",
            epoch=finished,
            generation=self.link.generation,
            carried=self.sampler.carried,
            num_samples=self.sampler.num_samples,
        )
        self._regrouper.since = self.link.steps  # all have come to the end with the same number of steps


class Step:
    """One step: `with step as batch:`. If the workers change in it, it ends early, and its samples are dealt
    anew; what it changed is nothing but gradients."""

    def __init__(self, loop: ElasticLoop, batch: Any) -> None:
        self._loop, self._batch = loop, batch
        self.entered = False
        self._before = 0
        """Steps that were done when this one began."""
        self.done = False
        """Whether its samples count as trained on: with the step that this worker has made, or with one that
        others made with its gradient while it saw a loss first. A worker that was left out, and comes back
        as a new one, is not told of the latter."""

    def __enter__(self) -> Any:
        loop = self._loop
        self.entered = loop.caller.in_step = True
        self._before = loop.link.steps
        if loop.journal.is_open:
            self._note("step", indices=loop.sampler.current())
        weight = loop.sampler.weight
        if weight != 1.0:
            loop.link.weight(weight)
        return self._batch

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        loop = self._loop
        loop.caller.in_step = False
        # the workers may change when the optimizer has stepped, in a call of all together
        if error is None or (isinstance(error, PeerLost) and loop.link.steps > self._before):
            self.done = True
            if loop.journal.is_open:
                self._note("done")
            loop.sampler.take()
        elif not isinstance(error, PeerLost):
            return False
        if error is not None or loop.link.lost is not None:
            loop.regroup()
            self.done = self.done or loop.completed  # then the sampler has been told already
        return True

    def _note(self, what: str, **facts: Any) -> None:
        link, sampler = self._loop.link, self._loop.sampler
        place = {"generation": link.generation, "epoch": sampler.epoch}
        self._loop.journal.note(what, steps=link.steps, **place, **facts)
