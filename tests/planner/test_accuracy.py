"""Expected losses come from measured rows only, and say what they are from."""

from __future__ import annotations

from typing import Any

from thinwire.planner.accuracy import EXACT, expected, standard_error
from thinwire.strategies import registry
from thinwire.strategies.measured import Measured, table


def row(**changes: Any) -> Measured:
    usual: dict[str, Any] = {"recipe": "a", "metric": "accuracy", "workers": 8, "epochs": 3, "steps": 6000}
    usual |= {"strategy": "s", "settings": {}, "loss": 0.5, "error": 0.1, "seeds": 3, "source": "file"}
    return Measured(**usual | changes)


def test_every_row_is_a_strategy_of_today() -> None:
    assert table()
    for each in table():
        built = registry.build(each.strategy, each.settings)
        assert registry.resolved(built).items() >= dict(each.settings).items()


def test_exact_sgd_loses_nothing() -> None:
    assert expected("all-reduce", {"overlap": "none"}, 1000) == EXACT


def test_what_was_not_measured_is_not_guessed() -> None:
    rows = [row()]
    assert expected("other", {}, 4, rows=rows) is None
    assert expected("s", {"density": 1}, 4, rows=rows) is None
    assert expected("s", {}, 17, rows=rows) is None  # more than twice the workers
    found = expected("s", {"warmup_steps": 5}, 16, rows=rows)  # how it began makes no other strategy
    assert found is not None
    assert (found.loss, found.low, found.high) == (1.0, 0.8, 1.2)  # twice the workers, twice the loss
    assert "a with 8 workers" in found.basis


def test_a_setting_that_is_newer_than_the_row_must_be_off() -> None:
    rows = [row(settings={"density": 0.1})]
    assert expected("s", {"density": 0.1, "newer": None}, 8, rows=rows) is not None
    assert expected("s", {"density": 0.1, "newer": 3}, 8, rows=rows) is None
    assert expected("s", {}, 8, rows=rows) is None


def test_the_own_recipe_counts_else_the_worst() -> None:
    rows = [row(), row(recipe="b", loss=2.0), row(recipe="c", loss=9.0, metric="perplexity")]
    own, unknown, text = (expected("s", {}, 8, recipe=name, rows=rows) for name in ("a", None, "c"))
    assert own is not None
    assert own.loss == 0.5
    assert unknown is not None
    assert unknown.loss == 2.0
    assert text is not None
    assert text.loss == 9.0


def test_with_normalised_steps_only_what_was_trained_with_one_counts() -> None:
    text = row(recipe="t", metric="perplexity", loss=30.0, error=1.0, normalised=True)
    rows = [row(), row(recipe="b", loss=0.2, normalised=True), text]
    found = expected("s", {}, 8, normalised=True, rows=rows)
    assert found is not None
    assert found.loss == 30.0
    assert expected("s", {}, 8, normalised=True, rows=[row()]) is None


def test_a_row_that_shows_mostly_chance_counts_for_its_own_recipe_only() -> None:
    rows = [row(), row(recipe="tiny", loss=1.7, error=0.9)]
    unknown, own = (expected("s", {}, 8, recipe=name, rows=rows) for name in (None, "tiny"))
    assert unknown is not None
    assert unknown.loss == 0.5
    assert own is not None
    assert own.loss == 1.7


def test_a_row_that_is_far_from_nothing_counts_however_uncertain() -> None:
    found = expected("s", {}, 8, rows=[row(), row(recipe="tiny", loss=1.9, error=0.9)])
    assert found is not None
    assert found.loss == 1.9


def test_who_sends_less_loses_no_less() -> None:
    whole = row(recipe="t", settings={"share": 1.0, "every": 1}, loss=2.0)
    rows = [row(settings={"share": 0.1, "every": 1}), whole]
    found = expected("s", {"share": 0.1, "every": 1}, 8, rows=rows)
    assert found is not None
    assert found.loss == 2.0
    assert "t with 8 workers, share=1, 3 epochs" in found.basis
    own = expected("s", {"share": 0.1, "every": 1}, 8, recipe="a", rows=rows)
    assert own is not None
    assert own.loss == 0.5
    assert expected("s", {"share": 0.1, "every": 2}, 8, rows=rows) is None
    assert expected("s", {"share": 0.1, "every": 1}, 8, rows=[whole]) is None  # not measured itself


def test_a_short_training_is_not_judged_by_long_ones() -> None:
    rows = [row()]
    assert [expected("s", {}, 8, num_steps=steps, rows=rows) is None for steps in (599, 600)] == [True, False]


def test_a_short_training_counts_for_its_own_recipe_only() -> None:
    rows = [row(), row(recipe="short", loss=3.0, steps=200)]
    unknown, own = (expected("s", {}, 8, recipe=name, rows=rows) for name in (None, "short"))
    assert unknown is not None
    assert unknown.loss == 0.5
    assert own is not None
    assert own.loss == 3.0
    assert "3 epochs of 66 steps" in own.basis


def test_the_nearest_number_of_workers_that_is_enough() -> None:
    rows = [row(workers=4, loss=0.1), row(workers=16, loss=1.0), row(workers=64, loss=5.0)]
    losses = [expected("s", {}, workers, rows=rows) for workers in (2, 5, 16, 17, 128)]
    assert [found and found.loss for found in losses] == [0.1, 1.0, 1.0, 5.0, 10.0]


def test_one_run_is_as_uncertain_as_single_runs_are() -> None:
    assert standard_error([1.0], [1.0], 0.3) == 0.3 * 2**0.5
    assert standard_error([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 0.0) == 0.0
