"""Where each worker is in the training when the workers have changed, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import PeerDiffers, PeerLost, UsageError


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a worker is, as it tells all others."""

    id: str
    new: bool
    synced: int
    """The generation that it has last trained in."""
    rank: int
    """In that generation."""
    steps: int
    epoch: int
    taken: int
    """Batches of that epoch trained on since its share was last dealt."""
    known: list[int]
    """Steps of each worker of that generation, as far as it knows."""
    since: int
    """Steps done when shares were last dealt."""
    shared: str
    alike: str
    """Digest of model and settings."""
    calls: int
    """Common calls that have ended on this worker."""
    averaged: bool
    """Whether the last of them left all with one model."""
    mixed: bool
    """Whether workers may be at different places of the program."""
    batch_size: int = 0
    """Of all workers together, which they must be able to share; 0 if each has one of its own."""

    def is_behind(self, giver: Standing, *, agree: bool) -> bool:
        """Whether this worker must take over the giver's model and optimizer; `agree`: replicas do."""
        if self.new or self.shared != giver.shared:
            return True
        if self.calls < giver.calls and giver.averaged:
            return True
        return agree and (self.synced, self.steps) != (giver.synced, giver.steps)

    def is_completed_by(self, giver: Standing, *, agree: bool) -> bool:
        """Whether the giver has made the step that this worker was in, with its gradient: then its batch
        counts as trained on. Nobody is further ahead than that, since a step needs the gradients of all."""
        return agree and not self.new and self.steps < giver.steps


def giver_of(standings: Sequence[Standing]) -> Standing:
    """The worker that has come furthest: the others go on from where it is."""
    old = [each for each in standings if not each.new]
    return max(old, key=lambda each: (each.synced, each.steps, each.epoch, each.calls))


def check_joiners(standings: Sequence[Standing], own_id: str) -> None:
    """A joiner with another model, or one too many for a batch, leaves with an error; the others go on
    without it."""
    old = [each for each in standings if not each.new]
    most = max(each.batch_size for each in old)
    if most and len(standings) > most:
        extra = [each.id for each in standings if each.new][max(0, most - len(old)) :]
        words = f"batches of {most} samples for all workers together cannot be shared by {len(standings)}"
        if own_id in extra:
            raise UsageError(f"this worker cannot join: {words}", hint="make batch_size larger")
        raise PeerLost(f"{', '.join(extra)} must leave: {words}")
    alike = old[0].alike
    wrong = [each.id for each in standings if each.new and each.alike != alike]
    if own_id in wrong:
        raise PeerDiffers(
            "this worker has another model or other settings than the world it joins",
            hint="run the same script with the same arguments",
        )
    if wrong:
        raise PeerLost(f"{', '.join(wrong)} has another model or other settings, and must leave")


def batches_done(standings: Sequence[Standing], giver: Standing, *, agree: bool) -> list[int]:
    """Batches that each worker of the giver's generation has done of its share, lost ones too."""
    there = {each.rank: each for each in standings if not each.new and each.synced == giver.synced}
    known = [max(steps) for steps in zip(*(each.known for each in there.values()), strict=True)]
    done = []
    for rank, steps in enumerate(known):
        if agree:
            done.append(giver.taken)
        elif rank in there:
            # whoever is still at the end of the epoch before has done nothing of this one
            done.append(there[rank].taken if there[rank].epoch == giver.epoch else 0)
        else:  # it is lost: what it last said to have done
            done.append(max(0, steps - giver.since))
    return done
