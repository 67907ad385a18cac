"""What is shown of a run, from made-up events and a clock of our own."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.cli.train import summary
from thinwire.cli.view import LINE_EVERY_S, MAX_LINES, LineView, live_view, numbers
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Event, Failed, Progress, Record, RunStarted, Summary
from thinwire.recipes.follow import FinishedRun, RunState, explain
from thinwire.recipes.launch import WorkerFailure


def progress(step: int, *, loss: float = 0.5, instruments: dict[str, float] | None = None) -> Progress:
    return Progress(
        step=step,
        num_steps=100,
        epoch=1 if step <= 50 else 2,
        num_epochs=2,
        loss=loss,
        samples_per_s=50.0,
        sent_bytes=1000 * step,
        exposed_s=0.025 * step,
        train_s=0.1 * step,
        instruments=instruments or {},
    )


def state_of(*records: tuple[int, Record]) -> RunState:
    state = RunState(2)
    for time, (rank, record) in enumerate(records):
        state.apply([Event(float(time), rank, record)])
    return state


EVALUATED = Evaluated(step=50, epoch=1, metric="accuracy", value=0.951, loss=0.2, train_s=5.0)
LOST = Failed(
    host="b", error="PeerLost", message="worker 1 on b is lost at step 3", hint="look", consequence=True
)
NAN = Failed(host="b", error="NumericError", message="worker 1 on b: the loss is nan", hint="slower")
STARTED = RunStarted(config={}, versions={}, host="b", pid=42, world_size=2)


def test_state_puts_workers_together() -> None:
    state = state_of((0, progress(40, loss=1.0)), (1, progress(20)), (1, progress(50)), (0, EVALUATED))
    assert numbers(state) == "loss 0.7500  accuracy 95.1 %  100 samples/s  sent 90.0 kB  exposed 25%"
    assert state.done_share == 0.5
    assert state.left_s == pytest.approx(5.0)


def test_what_a_strategy_tells_is_averaged_and_shown() -> None:
    told = [progress(10, instruments={"late_rounds": late, "share": 0.25}) for late in (1.0, 4.0)]
    state = state_of((0, told[0]), (1, told[1]))
    assert numbers(state).endswith("exposed 25%  late rounds 2.5  share 0.25")


def test_state_speaks_for_workers_not_heard_of() -> None:
    assert "100 samples/s" in numbers(state_of((0, progress(10))))


def test_lines_come_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    last = replace(EVALUATED, step=100, epoch=2, value=0.99)
    view = LineView("title", clock=lambda: now)
    for step in (0, 10, 20, 90, 99):
        view.show(state_of(*[(rank, progress(step)) for rank in (0, 1) if step], (0, EVALUATED)))
        now += LINE_EVERY_S / 2
    for _ in range(2):
        view.show(state_of((0, progress(100)), (0, last)))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "title",
        "epoch 1/2  loss 0.5000  accuracy 95.1 %  100 samples/s  sent 20.0 kB  exposed 25%  9 s left",
        "epoch 2/2  loss 0.5000  accuracy 95.1 %  100 samples/s  sent 180 kB  exposed 25%  1 s left",
        "epoch 2/2  loss 0.5000  accuracy 99 %  100 samples/s  sent 200 kB  exposed 25%",
    ]


def test_long_runs_get_no_more_lines_than_one_reads(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    view = LineView("title", clock=lambda: now)
    for step in range(1, 101):
        now += 36.0
        view.show(state_of((0, replace(progress(step), train_s=now))))
    assert MAX_LINES <= len(capsys.readouterr().err.splitlines()) <= MAX_LINES + 2


def test_live_view_shows_bar_and_numbers_without_colour() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=100)
    with live_view(console, "title") as show:
        show(state_of((0, STARTED)))
        show(state_of((0, progress(40)), (0, EVALUATED)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "starting: 1 of 2 workers are up" in shown
    assert "epoch 1/2" in shown
    assert "40%" in shown
    assert "6 s left" in shown
    assert "accuracy 95.1 %" in shown
    assert "\x1b[3" not in shown  # a colour


def test_root_cause_is_the_first_failure_that_is_no_consequence(tmp_path: Path) -> None:
    state = state_of((0, LOST), (1, NAN))
    assert state.root_cause == (1, NAN)
    error = explain(tmp_path, state, 1)
    assert (error.message, error.hint) == ("worker 1 on b: the loss is nan", "slower")
    assert state_of((0, LOST)).root_cause == (0, LOST)


@pytest.mark.parametrize(
    ("rank", "status", "failures", "words", "told"),
    [
        (1, -9, [], "worker 1 on b was killed by SIGKILL (pid 42)", False),
        (1, -9, [(0, LOST)], "worker 1 on b was killed by SIGKILL (pid 42)", False),
        (1, 3, [], "worker 1 on b ended with status 3 (pid 42)", False),
        (0, 1, [(0, LOST)], "worker 1 on b is lost at step 3", True),
        (0, -15, [(1, NAN)], "worker 1 on b: the loss is nan", True),
    ],
)
def test_a_killed_worker_is_reported_by_the_launcher(
    rank: int, status: int, failures: list[tuple[int, Record]], words: str, told: bool, tmp_path: Path
) -> None:
    state = state_of((1, STARTED), *failures)
    error = explain(tmp_path, state, 1, WorkerFailure(rank, 42, status))
    assert error.message == words
    assert len(read_events(tmp_path)) == (0 if told else 1)


def test_workers_that_never_came_up_are_explained_by_the_log(tmp_path: Path) -> None:
    log = tmp_path / "workers.log"
    log.write_text("something\nNo module named torch\n\n")
    error = explain(tmp_path, RunState(2), 1)
    assert error.message == "the workers ended without a result (status 1): No module named torch"
    assert str(log) in error.hint


def test_unexpected_errors_point_to_the_traceback(tmp_path: Path) -> None:
    failed = Failed(host="b", error="KeyError", message="'x'", expected=False)
    error = explain(tmp_path, state_of((1, failed)), 1)
    assert error.message == "worker 1 on b: KeyError: 'x'"
    assert "traceback" in error.hint


def test_summary_is_readable() -> None:
    result = Summary(
        recipe="digits-cnn",
        strategy="all-reduce",
        settings={},
        workers=4,
        epochs=2,
        steps=100,
        metric="accuracy",
        value=0.986,
        target=0.97,
        reached=True,
        loss=0.1,
        train_s=12.3,
        samples_per_s=2345.6,
        sent_bytes=423_836_640,
        sent_bytes_per_step=230_346.0,
        messages=10,
        exposed_share=0.604,
    )
    assert summary(FinishedRun(result, 75.0, Path("runs/x"))).splitlines() == [
        "accuracy  98.6 % (target 97 %: reached)",
        "time      1 min 15 s, of which training 12 s",
        "speed     2,346 samples/s with 4 workers",
        "sent      230 kB per step and worker, 424 MB in all",
        "exposed   60.4 % of training time spent waiting for the wire",
        "results   runs/x",
    ]
