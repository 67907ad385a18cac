"""Lines and requests of workers, without workers."""

from __future__ import annotations

import os
import selectors
import threading
from multiprocessing.connection import Pipe

import pytest

from thinwire.errors import SettingError, UsageError
from thinwire.lab.control import CONTROL_VARIABLE, Control
from thinwire.lab.network import Counters
from thinwire.lab.worker import answer_requests, forward_output


def _serve(selector: selectors.BaseSelector) -> None:
    while ready := selector.select(0):
        for key, _ in ready:
            key.data()


def _serve_until_closed(selector: selectors.BaseSelector) -> None:
    while selector.get_map():
        for key, _ in selector.select(0.05):
            key.data()


def test_lines_get_their_prefix_and_the_last_one_its_end() -> None:
    selector = selectors.DefaultSelector()
    (source, into), (out, target) = os.pipe(), os.pipe()
    forward_output(source, target, "[host3] ", selector)
    assert selector.get_map()
    os.write(into, b"one\ntw")
    _serve(selector)
    os.write(into, b"o\n\nlast")
    _serve(selector)
    os.close(into)
    _serve(selector)
    os.close(target)
    assert os.read(out, 1000) == b"[host3] one\n[host3] two\n[host3] \n[host3] last\n"
    assert not selector.get_map()
    os.close(out)
    selector.close()


def test_a_reader_that_has_gone_is_no_problem() -> None:
    selector = selectors.DefaultSelector()
    (source, into), (out, target) = os.pipe(), os.pipe()
    forward_output(source, target, "", selector)
    os.close(out)
    os.write(into, b"nobody reads this\n")
    _serve(selector)
    os.close(into)
    _serve(selector)
    os.close(target)
    selector.close()


def test_requests_are_answered_and_refusals_told() -> None:
    asked: list[dict[str, object]] = []

    def answer(request: dict[str, object]) -> object:
        asked.append(request)
        if request["do"] == "fault":
            raise SettingError("fault must be given")
        return {"counters": [Counters(1, 2, 3, 4)], "uplinks": []}.get(str(request["do"]))

    ours, theirs = Pipe()
    selector = selectors.DefaultSelector()
    answer_requests(ours, selector, answer)
    server = threading.Thread(target=_serve_until_closed, args=(selector,))
    server.start()
    control = Control(theirs)
    control.set_rate(1e8, host=2)
    assert asked == [{"do": "rate", "bit_per_s": 1e8, "host": 2}]
    assert control.counters() == [Counters(1, 2, 3, 4)]
    assert control.uplinks() == []
    with pytest.raises(UsageError, match="refused fault: fault must be given"):
        control.fault("")
    theirs.close()
    server.join(10)
    assert not server.is_alive()
    selector.close()


def test_a_lab_that_is_gone_is_told() -> None:
    ours, theirs = Pipe()
    control = Control(theirs)
    ours.close()
    with pytest.raises(UsageError, match="the lab is gone"):
        control.counters()
    theirs.close()


def test_outside_a_lab_there_is_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTROL_VARIABLE, raising=False)
    assert Control.from_environment() is None
