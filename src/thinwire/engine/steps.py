"""The loop of an elastic training: steps that are done again when the workers change in their middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from thinwire.elastic.sampler import ElasticSampler
from thinwire.errors import PeerLost, UsageError

if TYPE_CHECKING:
    from thinwire.engine.link import Link


class Step:
    """One step: `with step as batch:`. If the workers change in it, it ends early, and its samples are dealt
    anew; what it changed is nothing but gradients."""

    def __init__(self, link: Link, batch: Any, sampler: ElasticSampler) -> None:
        self._link, self._batch, self._sampler = link, batch, sampler
        self._journal = link._elastic.world.journal
        self.entered = False
        self.done = False
        """Whether it was trained on."""

    def __enter__(self) -> Any:
        self.entered = self._link._in_step = True
        if self._journal.is_open:
            self._note("step", indices=self._sampler.current())
        weight = self._sampler.weight
        if weight != 1.0:
            self._link.weight(weight)
        return self._batch

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._link._in_step = False
        if error is None:
            self.done = True
            if self._journal.is_open:
                self._note("done")
            self._sampler.take()
        elif not isinstance(error, PeerLost):
            return False
        if error is not None or self._link.lost is not None:
            self._link._regroup()
        return True

    def _note(self, what: str, **facts: Any) -> None:
        link = self._link
        place = {"generation": link.generation, "epoch": self._sampler.epoch}
        self._journal.note(what, steps=link.steps, **place, **facts)


def each_epoch(link: Link, sampler: ElasticSampler, num_epochs: int) -> Iterator[int]:
    """The epochs that are left; whoever joins begins with the present one."""
    while sampler.epoch < num_epochs:
        epoch = sampler.epoch
        yield epoch
        if sampler.epoch == epoch:  # the loop over steps was left early, or there was none
            finish_epoch(link, sampler)


def each_step(link: Link, sampler: ElasticSampler, loader: Iterable[Any]) -> Iterator[Step]:
    """The steps of this epoch that are left, until all workers are through with it."""
    epoch = sampler.epoch
    while sampler.epoch == epoch:
        if not len(sampler):
            if link._meet("the end of an epoch"):
                break
            continue  # what a lost worker has left undone may have been dealt out
        generation = link.generation
        for batch in loader:
            if not link._begin_step():
                break
            step = Step(link, batch, sampler)
            yield step
            if not step.entered:
                raise UsageError("a step was not entered", hint="write `with step as batch:` in the loop")
            if link.generation != generation:
                break  # what the loader has read ahead belongs to others now
    if sampler.epoch == epoch:
        finish_epoch(link, sampler)


def finish_epoch(link: Link, sampler: ElasticSampler) -> None:
    finished = sampler.epoch
    sampler.next_epoch()
    link._elastic.world.journal.note(
        "epoch", epoch=finished, generation=link.generation, carried=sampler.carried
    )
    link._note_epoch()
