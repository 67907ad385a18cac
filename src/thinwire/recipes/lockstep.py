"""One optimizer step for all replicas, where they agree from beginning to end."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import UsageError
from thinwire.recipes.keep import Course
from thinwire.simulate.replicas import Replicas


class Lockstep:
    """Replicas with the same parameters and gradients make the same step: the optimizer of the first one
    makes it for all, as soon as anybody is to make it.

    Nobody needs the parameters of before any more then: a reduced gradient has everybody's in it.
    """

    def __init__(self, replicas: Replicas, courses: Sequence[Course]) -> None:
        self._replicas, self._courses = replicas, courses
        self._done = [0] * len(courses)
        """Steps, by replica,"""
        self._made = 0
        """and those that were made for all of them."""

    def step(self, index: int) -> None:
        """Replica `index` is to step, with the gradients that it has."""
        self._done[index] += 1
        if self._done[index] <= self._made:
            return
        self._made += 1
        first, *others = self._courses
        with self._replicas.lending_gradients(index, to=0):
            first.optimizer.step()
        self._replicas.spread_()
        first.step()
        for course in others:
            course.follow(first)

    def check(self) -> None:
        """Whether they do have the same gradients; between two epochs, when nothing is under way."""
        for index in range(1, len(self._courses)):
            if not self._replicas.same_gradients(0, index):
                raise UsageError(
                    "replicas_agree of a strategy must be False if workers apply different gradients, got "
                    f"True: those of workers 0 and {index} differ in step {self._made}",
                    hint="let reduce leave the same bits in the bucket on every worker",
                )
