from __future__ import annotations

import pytest

from thinwire.wire.work import Work, all_of


def test_work_ends_once_and_calls_back_once() -> None:
    work, calls = Work(), []
    work.when_done(lambda: calls.append("before"))
    assert not work.wait(0.01)
    work.finish()
    work.fail(ValueError("too late"))
    work.when_done(lambda: calls.append("after"))
    assert work.wait()
    assert calls == ["before", "after"]


def test_all_of_ends_with_the_last_and_has_the_first_error() -> None:
    works = [Work(), Work()]
    together, empty = all_of(works), all_of([])
    assert empty.done()
    works[1].finish()
    assert not together.done()
    works[0].fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        together.wait(1)


def test_a_follower_ends_as_the_work_it_follows() -> None:
    first, second = Work(), Work()
    followers = [Work(), Work()]
    for follower, work in zip(followers, (first, second), strict=True):
        follower.follow(work)
    assert not followers[0].done()
    first.finish()
    second.fail(ValueError("broken"))
    assert followers[0].wait(0)
    with pytest.raises(ValueError, match="broken"):
        followers[1].wait(0)
