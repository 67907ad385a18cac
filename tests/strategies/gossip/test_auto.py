"""share="auto": what is measured, what is agreed on, and that it fits without leaving the wire idle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from thinwire.strategies.gossip.auto import FILL, FIRST_SHARE, MEET_EVERY, Gauge, Menu, Pick, Report, agree

MODEL = 5_000_000
MENU = Menu({"fp32": 4 * MODEL, "bf16": 2 * MODEL, "int8": MODEL + 40_000}, 260)
FIRST = Pick("int8", round(FIRST_SHARE * 260))


def report(bytes_per_s: float, compute_s: float, waited_s: float = 0.0, num_bytes: float = 0.0) -> Report:
    return Report(1 / bytes_per_s, 1 / bytes_per_s, compute_s, waited_s, num_bytes)


def play(
    bytes_per_s: float, compute_s: float, *, rounds: int = 80, noise: float = 0.02, buckets: int = 20
) -> tuple[list[Pick], float, float]:
    """Two workers over a made-up wire: the picks; efficiency and use of the wire in the second half."""
    dice, pick, caution = random.Random(0), FIRST, 1.0
    gauges, gathered, picks = [Gauge(), Gauge()], list[Report](), list[Pick]()
    now_s = arrival_s = waited_s = sent = 0.0
    for number in range(1, rounds + 1):
        if number % MEET_EVERY == 0:
            if gathered:
                pick, caution = agree(gathered, pick, caution, MENU)
            gathered = [gauge.report() for gauge in gauges]
        picks.append(pick)
        share = pick.num_cells / MENU.num_cells
        num_bytes = int(MENU.model_bytes[pick.payload] * share)
        messages = max(1, round(share * buckets))
        end_s = now_s + compute_s * (1 + noise * dice.uniform(-1, 1))
        for gauge in gauges:
            gauge.begin(now_s)
            arrival_s = now_s + 0.001
            for _ in range(messages):
                arrival_s += num_bytes / messages / bytes_per_s * (1 + noise * dice.uniform(-1, 1))
                gauge.arrived(arrival_s, num_bytes // messages)
            gauge.waited(max(0.0, arrival_s - end_s))
        now_s = max(end_s, arrival_s)
        for gauge in gauges:
            gauge.end(now_s)
        if number > rounds // 2:
            waited_s += now_s - end_s
            sent += num_bytes
    second_half_s = compute_s * rounds / 2 + waited_s
    return picks, 1 - waited_s / second_half_s, sent / bytes_per_s / second_half_s


@pytest.mark.parametrize("rate_bits_per_s", [1e9, 200e6, 100e6, 50e6, 20e6, 5e6])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_it_fits_and_uses_the_wire(rate_bits_per_s: float, noise: float) -> None:
    picks, efficiency, use = play(rate_bits_per_s / 8, compute_s=0.3, noise=noise)
    assert efficiency > 0.97
    if picks[-1].num_cells < MENU.num_cells:
        assert use > 0.70
        assert picks[-1].payload == "int8"
    settled = picks[20:]
    assert len(set(settled)) <= 3  # it does not flap


def test_a_fast_wire_carries_the_whole_model_as_it_is() -> None:
    assert play(1e9 / 8, compute_s=0.3)[0][-1] == Pick("fp32", 260)
    assert play(400e6 / 8, compute_s=0.3)[0][-1] == Pick("bf16", 260)
    assert play(200e6 / 8, compute_s=0.3)[0][-1] == Pick("int8", 260)


def test_it_settles_after_two_meetings() -> None:
    picks, _, _ = play(50e6 / 8, compute_s=0.3, noise=0.0)
    assert len(set(picks[: 2 * MEET_EVERY - 1])) == 1
    final = picks[-1].num_cells
    assert abs(picks[3 * MEET_EVERY].num_cells - final) <= 0.15 * final


def test_the_finest_payload_allowed_is_the_limit() -> None:
    menu = Menu({"int8": MODEL}, 260)
    assert agree([report(1e12, 1.0)], FIRST, 1.0, menu)[0] == Pick("int8", 260)


def test_the_slowest_wire_and_the_slowest_worker_decide() -> None:
    fast, thin = report(1e8, 0.3), report(1e6, 0.3)
    assert agree([fast, thin, fast], FIRST, 1.0, MENU) == agree([thin], FIRST, 1.0, MENU)
    # Who waits for a slow peer sees long exchanges. That is no reason to send less.
    waits = replace(report(1e8, 0.15, waited_s=0.15), whole_s=1e-6)
    straggler = report(1e8, 0.3)
    assert agree([waits, straggler], FIRST, 1.0, MENU) == agree([straggler], FIRST, 1.0, MENU)


def test_small_changes_are_not_worth_it_and_waiting_is() -> None:
    now = Pick("int8", 100)
    fits = FILL * 0.3 * 1e6 / MENU.model_bytes["int8"] * 260
    close, _ = agree([report(1e6 * 104 / fits, 0.3)], now, 1.0, MENU)
    assert close == now
    far, _ = agree([report(1e6 * 130 / fits, 0.3)], now, 1.0, MENU)
    assert far.num_cells == pytest.approx(130, abs=1)
    waited, caution = agree([report(1e6 * 104 / fits, 0.3, waited_s=0.05)], now, 1.0, MENU)
    assert waited.num_cells < 100
    assert caution < 1
    # Not so if rounds were larger than what is known now to fit: the wire is as fast as it is measured.
    too_much, caution = agree(
        [report(1e6 * 60 / fits, 0.3, waited_s=0.2, num_bytes=100 / 260 * MODEL)], now, 1.0, MENU
    )
    assert too_much.num_cells == pytest.approx(60, abs=1)
    assert caution == 1


def test_nothing_measured_changes_nothing() -> None:
    assert agree([Gauge().report(), Gauge().report()], FIRST, 0.9, MENU) == (FIRST, 0.9)


def test_an_evaluation_in_between_does_not_count() -> None:
    gauge = Gauge()
    for number in range(4):
        gauge.begin(100.0 * number)
        gauge.arrived(100.0 * number + 0.1, 1000)
        gauge.end(100.0 * number + (60.0 if number == 2 else 0.3))
    assert gauge.report().compute_s == pytest.approx(0.3)
