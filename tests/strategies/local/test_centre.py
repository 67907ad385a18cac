"""A centre outlives its owners: the newest copy of each part becomes the centre of the next world."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.inline import Inline
from tests.strategies.inline import make_core, waiting
from thinwire.engine.core import Core
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalWorld

BUCKETS = [[torch.zeros(20)], [torch.zeros(30)], [torch.zeros(40)]]
CENTRED: list[Strategy] = [tw.Downpour(), tw.EASGD(interval=1, pull=0.25)]


def make_world(strategy: Strategy, world_size: int, inline: Inline) -> list[Core]:
    world = LocalWorld(world_size)
    return [make_core(strategy, world.lane(rank), inline, BUCKETS) for rank in range(world_size)]


def state_of(core: Core) -> Any:
    return core.groups[0].state


def mix(strategy: Strategy, inline: Inline, core: Core, changed: float) -> None:
    """One worker changes its parameters, and asks the owners."""
    for parameter in core.model.parameters():
        parameter.data.add_(changed)
    for bucket in core.buckets:
        inline.run(strategy.mix(bucket, state_of(core), core.endpoint(None).wire()))


def change(strategy: Strategy, inline: Inline, stay: list[Core], joining: int = 0) -> list[Core]:
    """The world of those who stay, and who joins."""
    saved: list[dict[str, Any] | None] = [core.state_dict() for core in stay]
    saved += [None] * joining
    cores = make_world(strategy, len(saved), inline)
    for core, before, own in zip(cores, [*stay, *[stay[0]] * joining], saved, strict=True):
        for mine, theirs in zip(core.model.parameters(), before.model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        assert saved[0] is not None
        core.take_over(own, saved[0], joins=own is None)
    tasks = [waiting(inline, core, core.recovering()) for core in cores]
    inline.settle()
    for task in tasks:
        assert task.done()
        task.wait()
    return cores


def centres(core: Core) -> list[float]:
    return [float(centre[0]) for centre in state_of(core).centres]


@pytest.mark.parametrize("strategy", CENTRED, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [1, 2]])
def test_what_was_answered_to_those_who_are_left_is_in_the_centre(
    strategy: Strategy, lost: list[int]
) -> None:
    inline = Inline()
    cores = make_world(strategy, 4, inline)
    for turn, rank in enumerate([0, 1, 2, 3, 0, 1, 2, 3]):  # the last one to ask is left
        mix(strategy, inline, cores[rank], 1.0 + turn)
    true = [float(state_of(cores[index % 4]).centres[index][0]) for index in range(len(BUCKETS))]
    assert all(true)
    left = change(strategy, inline, [core for rank, core in enumerate(cores) if rank not in lost])
    assert [centres(core) for core in left] == [true] * len(left)


def test_a_change_that_no_survivor_was_told_of_is_lost_and_nothing_else() -> None:
    strategy, inline = tw.Downpour(), Inline()
    cores = make_world(strategy, 3, inline)
    mix(strategy, inline, cores[2], 1.0)
    mix(strategy, inline, cores[0], 10.0)  # of the bucket that it owns itself, nobody has heard
    left = change(strategy, inline, cores[1:])
    # buckets 1 and 2 are owned by those who are left
    assert centres(left[0]) == centres(left[1]) == [1.0, 11.0, 11.0]


def test_a_question_without_an_answer_counts_once() -> None:
    """The owner has added it, another worker has seen that, and the answer to it is lost."""
    strategy, inline = tw.Downpour(), Inline()
    cores = make_world(strategy, 3, inline)
    for core in cores:
        mix(strategy, inline, core, 1.0)  # 1, then 2, then 3 in the centre
    state = state_of(cores[1])
    question = torch.full((20,), 5.0)
    for parameter in cores[1].model.parameters():
        parameter.data.add_(5.0)
    state.pending[0] = question
    strategy.answer(question, state_of(cores[0]).centres[0], 3)
    state_of(cores[0]).counts[0][1] += 1
    mix(strategy, inline, cores[2], 0.0)
    left = change(strategy, inline, cores[1:])
    assert centres(left[0])[0] == 3 + 5
    mix(strategy, inline, left[0], 0.0)
    assert centres(left[0])[0] == 3 + 5, "it would have been 13 if it had pushed that change again"
    assert centres(left[0])[1] == 3 + 5, "of which the centre had nothing, so it was pushed now"


@pytest.mark.parametrize("strategy", CENTRED, ids=lambda each: type(each).__name__)
def test_who_joins_begins_at_the_centre_with_nothing_to_push(strategy: Strategy) -> None:
    inline = Inline()
    cores = make_world(strategy, 2, inline)
    for turn in range(4):
        mix(strategy, inline, cores[turn % 2], 1.0)
    for parameter in cores[0].model.parameters():
        parameter.data.add_(100.0)  # not pushed yet
    before = [float(state_of(cores[index % 2]).centres[index][0]) for index in range(len(BUCKETS))]
    *_, new = change(strategy, inline, cores, joining=1)
    assert centres(new) == [float(p.data.flatten()[0]) for p in new.model.parameters()] == before
    mix(strategy, inline, new, 0.0)
    assert centres(new) == pytest.approx(before)


def test_a_second_loss_before_anything_was_asked_keeps_the_centre() -> None:
    strategy, inline = tw.Downpour(), Inline()
    cores = make_world(strategy, 4, inline)
    for rank in (0, 1, 2, 3):
        mix(strategy, inline, cores[rank], 1.0)
    left = change(strategy, inline, change(strategy, inline, cores[1:])[1:])
    assert centres(left[0]) == centres(left[1]) == [4.0] * 3
