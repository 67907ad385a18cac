"""When neurons are removed."""

from __future__ import annotations

import pytest

from thinwire.apoptosis.pace import Decision, RemovalPace, Rests


def check(pace: RemovalPace, loss: float) -> Decision | None:
    """One check after ten steps with losses around this one; None: it was passed over."""
    for step in range(10):
        pace.observe(loss + 0.01 * (-1) ** step)
    return None if pace.skip() else pace.decide(pace.sums())


@pytest.mark.parametrize("adaptive", [True, False])
def test_intervals_between_removals_double(adaptive: bool) -> None:
    pace = RemovalPace(adaptive=adaptive)
    decisions = [check(pace, 10.0 - number) for number in range(1, 20)]
    removals = [number for number, decision in enumerate(decisions, start=1) if decision == "remove"]
    assert removals == [1, 2, 4, 8, 16]
    # the only other thing that is ever decided is whether the last removal stays
    others = [number for number, decision in enumerate(decisions, start=1) if decision == "wait"]
    assert others == ([3, 5, 9, 17] if adaptive else [])


def test_nothing_goes_while_the_loss_stands() -> None:
    pace = RemovalPace(adaptive=True)
    assert [check(pace, 1.0) for _ in range(4)] == ["remove", "wait", "wait", "wait"]
    assert check(pace, 0.5) == "remove"


def test_a_rise_right_after_a_removal_undoes_it_and_the_next_is_half_as_large() -> None:
    pace = RemovalPace(adaptive=True)
    assert check(pace, 1.0) == "remove"
    assert check(pace, 2.0) == "undo"
    assert pace.strength == 0.5
    assert check(pace, 1.5) == "remove", "what was undone says nothing about how the loss falls"
    assert pace.strength == 0.5


def test_a_later_rise_undoes_nothing() -> None:
    pace = RemovalPace(adaptive=True)
    assert [check(pace, loss) for loss in (3.0, 2.0, 1.0)] == ["remove", "remove", "wait"]
    assert check(pace, 9.0) == "wait"
    assert pace.strength == 1.5


def test_a_saved_pace_goes_on_where_it_was() -> None:
    pace = RemovalPace(adaptive=True)
    for number in range(5):
        check(pace, 10.0 - number)
    other = RemovalPace(adaptive=True)
    other.load_state_dict(pace.state_dict())
    losses = [4.0, 3.0, 2.0, 6.0, 1.0]
    assert [check(other, loss) for loss in losses] == [check(pace, loss) for loss in losses]


def test_a_layer_that_has_little_to_give_rests_longer_and_longer() -> None:
    rests, weighed = Rests(), list[list[int]]()
    for event in range(12):
        weighed.append(rests.awake(2))
        if event == 3:  # between two events a run was saved and continued
            again = Rests()
            again.load_state_dict(rests.state_dict())
            rests = again
        for number in weighed[-1]:
            rests.weighed(number, 0.3 if number == 0 else 0.0)
    assert [event for event, numbers in enumerate(weighed) if 1 in numbers] == [0, 2, 5, 10]
    assert all(0 in numbers for numbers in weighed)


def test_few_losses_between_two_checks_are_all_used() -> None:
    pace = RemovalPace(adaptive=True)
    for loss in (2.0, 3.0):
        pace.observe(loss)
    assert pace.sums() == [2.0, 5.0, 13.0]
    for loss in (9.0, 9.0, 2.0, 3.0):
        pace.observe(loss)
    assert pace.sums() == [2.0, 5.0, 13.0], "the first ones after an event are those of its recovery"


def test_a_late_first_removal_is_followed_at_twice_as_many_steps_each_time() -> None:
    pace = RemovalPace(adaptive=False, first=8)
    decisions = [check(pace, 1.0) for _ in range(8, 40)]
    assert [at for at, decision in enumerate(decisions, start=8) if decision == "remove"] == [8, 16, 32]
