"""Which strategy and how many workers, with the reason in a sentence; "stay on one machine" among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.planner.predict import CEILING, Planner, Prediction
from thinwire.planner.workload import Workload
from thinwire.strategies import registry
from thinwire.units import as_bytes, as_ratio, as_seconds, count

BUDGET = 1.0
"""Points of accuracy that may be lost unless the user says otherwise."""
WORTH = 1.1
"""A speed-up below this is not worth a second machine."""
EQUAL = 0.1
"""Speeds that differ by less than this share count as equal: the one that loses less accuracy wins."""
HIDDEN = 0.05
"""Communication is hidden when a step waits for at most this share of its computing time."""
EXACT = ("all-reduce", "all-reduce:overlap=forward")
LEAST_TIMES, MOST_TIMES = 1e-4, 1e5
"""The smallest and largest batch that is looked for, over that of the workload."""
PRECISION = 1.05
"""Factor within which the batch is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended strategy and number of workers."""

    strategy: str | None
    """The strategy to train with; None: stay on one machine."""
    workers: int
    speedup: float
    reason: str
    passed_over: tuple[str, ...] = ()
    """Faster strategies, and why they are not recommended."""
    advice: str = ""
    """The strategy's own warning for a training of this length."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def best_of(predictions: Sequence[Prediction], budget: float) -> Prediction | None:
    """The most exact of the fastest predictions within the budget; all have one number of workers."""
    allowed = [p for p in predictions if p.loss is not None and p.loss.loss <= budget]
    if not allowed:
        return None
    fastest = min(p.step_s for p in allowed)
    equal = [p for p in allowed if p.step_s <= (1 + EQUAL) * fastest]
    return min(equal, key=lambda p: (max(0.0, p.loss.loss) if p.loss else 0.0, p.step_s))


def recommend(
    predictions: Sequence[Prediction], workload: Workload, *, budget: float = BUDGET
) -> Recommendation:
    """The best number of workers and strategy; fewer workers where more gain less than a tenth."""
    shown = [p for p in predictions if p.strategy != CEILING]
    counts = sorted({p.workers for p in shown})
    best = [best_of([p for p in shown if p.workers == n], budget) for n in counts]
    found = [p for p in best if p is not None]
    top = max((p.speedup for p in found), default=0.0)
    if top < WORTH:
        return _stay(found, shown, budget)
    chosen = next(p for p in found if p.speedup >= (1 - EQUAL) * top)
    rivals = [p for p in shown if p.workers == chosen.workers]
    name, given = registry.parse(chosen.strategy)
    steps = workload.num_steps
    own_steps = None if steps is None else max(1, steps // chosen.workers)
    advice = registry.build(name, given).advice(own_steps, chosen.workers)
    return Recommendation(
        strategy=chosen.strategy,
        workers=chosen.workers,
        speedup=chosen.speedup,
        reason=_reason(chosen, rivals, workload),
        passed_over=_passed_over(chosen, rivals, budget),
        advice=advice,
    )


def _exact(predictions: Sequence[Prediction]) -> Prediction | None:
    return min((p for p in predictions if p.strategy in EXACT), key=lambda p: p.step_s, default=None)


def _reason(chosen: Prediction, rivals: Sequence[Prediction], workload: Workload) -> str:
    exact = _exact(rivals)
    own = (
        f"{chosen.strategy} on {count(chosen.workers, 'worker')} is {as_ratio(chosen.speedup)} as fast as one"
    )
    if exact is None:
        return f"{own}."
    if chosen.strategy in EXACT:
        waits = f"waits {as_seconds(chosen.exposed_s)} of a step of {as_seconds(chosen.step_s)} for the wire"
        return f"{own}: exact SGD {waits}, and nothing within the budget is faster by more than a tenth."
    assert chosen.loss is not None
    less = exact.sent_bytes / max(chosen.sent_bytes, 1.0)
    sends = f"sends {as_ratio(less)} less" if less >= 1.5 else "hides what it sends behind the computing"
    return (
        f"{own}; exact SGD would be {as_ratio(exact.speedup)}, since its {as_bytes(exact.sent_bytes)} per "
        f"step keep a worker waiting for {as_seconds(exact.exposed_s)} beside "
        f"{as_seconds(workload.compute_s)} of computing. {chosen.strategy} {sends}, for "
        f"{chosen.loss.loss:.1f} points of accuracy."
    )


def _passed_over(chosen: Prediction, rivals: Sequence[Prediction], budget: float) -> tuple[str, ...]:
    faster = [p for p in rivals if p.step_s * (1 + EQUAL) < chosen.step_s]
    return tuple(_refused(p, budget) for p in sorted(faster, key=lambda p: p.step_s))


def _refused(p: Prediction, budget: float) -> str:
    speed = f"{p.strategy} ({as_ratio(p.speedup)})"
    if p.loss is None:
        return f"{speed}: its accuracy with {count(p.workers, 'worker')} was not measured"
    return f"{speed}: loses {p.loss.loss:.2f} points, the budget is {budget:g}"


def _stay(found: Sequence[Prediction], shown: Sequence[Prediction], budget: float) -> Recommendation:
    if not found:
        reason = "stay on one machine: no strategy was measured within the accuracy budget"
        return Recommendation(strategy=None, workers=1, speedup=1.0, reason=f"{reason}.")
    best = max(found, key=lambda p: p.speedup)
    rivals = [p for p in shown if p.workers == best.workers]
    reason = (
        f"stay on one machine: the fastest way within the accuracy budget, {best.strategy} on "
        f"{count(best.workers, 'worker')}, would be {as_ratio(best.speedup)} as fast as one, since a worker "
        f"would wait {as_seconds(best.exposed_s)} of every {as_seconds(best.step_s)} for the wire."
    )
    over = [p for p in rivals if p.speedup >= WORTH]
    refused = tuple(_refused(p, budget) for p in sorted(over, key=lambda p: p.step_s))
    return Recommendation(strategy=None, workers=1, speedup=1.0, reason=reason, passed_over=refused)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The least work per worker at which exact SGD hides its communication (Das et al.'s balance)."""

    workers: int
    times: float | None
    """Factor over the batch of the workload; None: no batch is large enough."""
    batch: int | None
    """Samples per worker; None: the workload's batch is not known."""
    compute_s: float | None


def balances(planner: Planner, counts: Sequence[int]) -> tuple[Balance, ...]:
    """The balance for each number of workers; each search begins where those before it lead to."""
    found = list[Balance]()
    for workers in counts:
        near = [each.times for each in found if each.times is not None]
        growth = near[-1] / near[-2] if len(near) > 1 else 1.0
        found.append(balance(planner, workers, near=near[-1] * growth if near else None))
    return tuple(found)


def balance(planner: Planner, workers: int, *, near: float | None = None) -> Balance:
    """The balance by simulation: computing time is proportional to the batch, messages stay the same."""
    strategy, own_s = registry.from_text(EXACT[1]), planner.ceiling_s(workers)

    def waits(times: float) -> float:
        """Time of waiting for the wire with `times` the batch, in computing times of the workload's step."""
        scaled = planner.scaled(times)
        return (scaled.play(strategy, workers).step_s - scaled.ceiling_s(workers)) / own_s

    if near is None:  # a step with next to nothing to hide behind is as long as its sending
        near = waits(LEAST_TIMES)
    times = _least_hidden(waits, near)
    if times is None:
        return Balance(workers=workers, times=None, batch=None, compute_s=None)
    batch = planner.workload.batch
    return Balance(
        workers=workers,
        times=times,
        batch=None if batch is None else max(1, math.ceil(batch * times)),
        compute_s=planner.workload.times(times).compute_s,
    )


def _least_hidden(waits: Callable[[float], float], near: float) -> float | None:
    """The least batch that hides what it waits for, but for `PRECISION`; None: it is above `MOST_TIMES`.

    Each value of `waits` costs a play, so the search makes the most of it. Waits get no longer as batches
    grow, so what is waited for with one batch says about which batch hides it. Once there are two, the next
    guess lies on the line through them, and a bit beyond.
    """
    low, high, times = LEAST_TIMES, MOST_TIMES, near
    last: tuple[float, float] | None = None
    while high > PRECISION * low:
        times = times if low < times < high else math.sqrt(low * high)
        wait = waits(times)
        over = wait - HIDDEN * times
        low, high = (times, high) if over > 0 else (low, times)
        before, last = last, (times, over)
        if before is None or before[1] == over:
            times = math.sqrt(times * max(wait / HIDDEN, LEAST_TIMES))
        else:
            times -= over * (times - before[0]) / (over - before[1])
            times *= math.sqrt(PRECISION) if over > 0 else 1 / math.sqrt(PRECISION)
    return high if high < MOST_TIMES else None
