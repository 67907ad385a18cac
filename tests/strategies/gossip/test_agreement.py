"""share="auto": measurements, and the agreement on a share that fits and leaves the wire never idle."""

from __future__ import annotations

import random

import pytest

from thinwire.strategies.gossip.agreement import (
    AGREE_EVERY,
    FILL,
    FIRST_SHARE,
    Measurement,
    Options,
    Pick,
    RoundTimer,
    agree,
)

MODEL = 5_000_000
OPTIONS = Options({"fp32": 4 * MODEL, "bf16": 2 * MODEL, "int8": MODEL + 40_000}, 260)
FIRST = Pick("int8", round(FIRST_SHARE * 260))


def measured(
    bytes_per_s: float, compute_s: float, waited_s: float = 0.0, num_bytes: float = 0.0
) -> Measurement:
    return Measurement(1 / bytes_per_s, 1 / bytes_per_s, compute_s, waited_s, num_bytes)


def play(
    bytes_per_s: float, compute_s: float, *, rounds: int = 80, noise: float = 0.02, buckets: int = 20
) -> tuple[list[Pick], float, float]:
    """Two workers over a made-up wire: the picks; efficiency and use of the wire in the second half."""
    dice, pick, caution = random.Random(0), FIRST, 1.0
    timers, gathered, picks = [RoundTimer(), RoundTimer()], list[Measurement](), list[Pick]()
    now_s = arrival_s = waited_s = sent = 0.0
    for number in range(1, rounds + 1):
        if number % AGREE_EVERY == 0:
            if gathered:
                pick, caution = agree(gathered, pick, caution, OPTIONS)
            gathered = [timer.measure() for timer in timers]
        picks.append(pick)
        share = pick.num_chunks / OPTIONS.num_chunks
        num_bytes = int(OPTIONS.model_bytes[pick.payload] * share)
        messages = max(1, round(share * buckets))
        end_s = now_s + compute_s * (1 + noise * dice.uniform(-1, 1))
        for timer in timers:
            timer.begin(now_s)
            arrival_s = now_s + 0.001
            for _ in range(messages):
                arrival_s += num_bytes / messages / bytes_per_s * (1 + noise * dice.uniform(-1, 1))
                timer.arrived(arrival_s, num_bytes // messages)
            timer.waited(max(0.0, arrival_s - end_s))
        now_s = max(end_s, arrival_s)
        for timer in timers:
            timer.end(now_s)
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
    if picks[-1].num_chunks < OPTIONS.num_chunks:
        assert use > 0.70
        assert picks[-1].payload == "int8"
    assert len(set(picks[20:])) <= 3  # it does not flap


def test_a_fast_wire_carries_the_whole_model_as_it_is() -> None:
    assert play(1e9 / 8, compute_s=0.3)[0][-1] == Pick("fp32", 260)
    assert play(400e6 / 8, compute_s=0.3)[0][-1] == Pick("bf16", 260)
    assert play(200e6 / 8, compute_s=0.3)[0][-1] == Pick("int8", 260)


def test_it_is_steady_after_two_agreements() -> None:
    picks, _, _ = play(50e6 / 8, compute_s=0.3, noise=0.0)
    assert len(set(picks[: 2 * AGREE_EVERY - 1])) == 1
    final = picks[-1].num_chunks
    assert abs(picks[3 * AGREE_EVERY].num_chunks - final) <= 0.15 * final


def test_the_finest_payload_allowed_is_the_limit() -> None:
    options = Options({"int8": MODEL}, 260)
    assert agree([measured(1e12, 1.0)], FIRST, 1.0, options)[0] == Pick("int8", 260)


def test_the_slowest_wire_and_the_slowest_worker_decide() -> None:
    fast, thin = measured(1e8, 0.3), measured(1e6, 0.3)
    assert agree([fast, thin, fast], FIRST, 1.0, OPTIONS) == agree([thin], FIRST, 1.0, OPTIONS)
    # Who waits for a slow peer sees long exchanges. That is no reason to send less.
    waits = measured(1e8, 0.15, waited_s=0.15)._replace(whole_s=1e-6)
    straggler = measured(1e8, 0.3)
    assert agree([waits, straggler], FIRST, 1.0, OPTIONS) == agree([straggler], FIRST, 1.0, OPTIONS)


def test_small_changes_are_not_worth_it_and_waiting_is() -> None:
    now = Pick("int8", 100)
    fits = FILL * 0.3 * 1e6 / OPTIONS.model_bytes["int8"] * 260
    close, _ = agree([measured(1e6 * 104 / fits, 0.3)], now, 1.0, OPTIONS)
    assert close == now
    far, _ = agree([measured(1e6 * 130 / fits, 0.3)], now, 1.0, OPTIONS)
    assert far.num_chunks == pytest.approx(130, abs=1)
    waited, caution = agree([measured(1e6 * 104 / fits, 0.3, waited_s=0.05)], now, 1.0, OPTIONS)
    assert waited.num_chunks < 100
    assert caution < 1
    # Not so if rounds were larger than what is known now to fit: the wire is as fast as it is measured.
    too_much, caution = agree(
        [measured(1e6 * 60 / fits, 0.3, waited_s=0.2, num_bytes=100 / 260 * MODEL)], now, 1.0, OPTIONS
    )
    assert too_much.num_chunks == pytest.approx(60, abs=1)
    assert caution == 1


def test_nothing_measured_changes_nothing() -> None:
    assert agree([RoundTimer().measure(), RoundTimer().measure()], FIRST, 0.9, OPTIONS) == (FIRST, 0.9)


def test_an_evaluation_in_between_does_not_count() -> None:
    timer = RoundTimer()
    for number in range(4):
        timer.begin(100.0 * number)
        timer.arrived(100.0 * number + 0.1, 1000)
        timer.end(100.0 * number + (60.0 if number == 2 else 0.3))
    assert timer.measure().compute_s == pytest.approx(0.3)
