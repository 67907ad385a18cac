from __future__ import annotations

from thinwire.simulate.clock import Clock


def test_calls_come_in_order_of_time_and_then_of_asking() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(2.0, lambda: seen.append("c"))
    clock.at(1.0, lambda: seen.append("a"))
    clock.at(1.0, lambda: seen.append("b"))
    clock.run()
    assert seen == ["a", "b", "c"]
    assert clock.now_s == 2.0


def test_soon_is_before_anything_later_at_the_same_time() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(1.0, lambda: clock.soon(lambda: seen.append("soon")))
    clock.at(1.0, lambda: seen.append("second"))
    clock.run()
    assert seen == ["soon", "second"]


def test_a_moment_is_over_when_nothing_else_happens_at_that_time() -> None:
    clock, seen = Clock(), list[object]()

    def first() -> None:
        clock.moment().when_done(lambda: seen.append(("over", clock.now_s)))
        clock.soon(lambda: seen.append("soon"))

    clock.at(1.0, first)
    clock.at(1.0, lambda: seen.append("same time"))
    clock.at(1.5, lambda: seen.append("later"))
    clock.run()
    assert seen == ["soon", "same time", ("over", 1.0), "later"]


def test_the_past_is_now() -> None:
    clock, seen = Clock(), list[float]()
    clock.at(3.0, lambda: clock.at(1.0, lambda: seen.append(clock.now_s)))
    clock.run()
    assert seen == [3.0]
