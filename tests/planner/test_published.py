"""Published numbers are data; formulas are the papers' own."""

from __future__ import annotations

import pytest

from thinwire.cli import main
from thinwire.errors import SettingError
from thinwire.lab.nets import parse_net
from thinwire.planner.published import gtopk_s, paper, ring_s, topk_s


def test_the_formulas_give_the_papers_model_values() -> None:
    alpha_s, beta_s, numbers = 0.436e-3, 3.6e-8, 25 * 2**20
    dense = [1e3 * ring_s(p, numbers, alpha_s, beta_s) for p in (4, 8, 16, 32, 64, 128)]
    assert dense == pytest.approx([1418, 1658, 1783, 1856, 1913, 1983], abs=1)
    selected = numbers / 1000
    sparse = [1e3 * topk_s(p, selected, alpha_s, beta_s) for p in (4, 8, 16, 32, 64, 128)]
    assert sparse == pytest.approx([6.5, 14.5, 30.1, 60.7, 121.5, 242.8], abs=0.1)
    tree = [1e3 * gtopk_s(p, selected, alpha_s, beta_s) for p in (4, 8, 16, 32, 64, 128)]
    assert tree == pytest.approx([9.3, 13.9, 18.6, 23.2, 27.9, 32.5], abs=0.1)


def test_the_clock_is_the_ring_formula_where_nothing_overlaps() -> None:
    rows = {row.what: row for row in paper("gtopk").rows}
    assert len(rows) == 5 * 3 * 4
    for what, row in rows.items():
        if ", dense," in what:
            assert row.formula is not None
            assert row.predicted == pytest.approx(row.formula, rel=0.02), what


def test_alpha_beta_rows_are_the_formulas_exactly() -> None:
    """ResNet-50, 64 images a step (25,557,032 numbers, 52.873 images per second alone)."""
    rows = {row.what: row for row in paper("gtopk").rows}
    alpha_s, beta_s, numbers = 0.436e-3, 4 * 9e-9, 25_557_032
    net = parse_net("resnet50")
    compute_s = net.batch / 52.873
    expected = {
        "dense": 2 * 31 * alpha_s + 2 * 31 / 32 * numbers * beta_s,
        "topk": 5 * alpha_s + 2 * 31 * 0.001 * numbers * beta_s,
        "gtopk": 2 * 5 * alpha_s + 4 * 0.001 * numbers * 5 * beta_s,
    }
    assert net.num_params == numbers
    for kind, wire_s in expected.items():
        by_formula = net.batch / (compute_s + wire_s)
        assert rows[f"resnet50, {kind}, 32 workers"].formula == pytest.approx(by_formula, rel=1e-9)


def test_a_wrong_unit_is_caught() -> None:
    found = paper("covenant")
    megabits, megabytes = found.rows
    assert megabits.ratio > 8
    assert megabytes.ratio == pytest.approx(1.0, abs=0.15)
    assert "only if these are megabytes" in found.finding


def test_speed_ups_of_das_are_in_reach() -> None:
    ratios = {row.what: row.ratio for row in paper("das").rows}
    assert len(ratios) == 5
    dense = ratios.pop("OverFeat-FAST, 64 nodes, 256 images")  # hybrid in the paper, data-parallel here
    assert 0.4 < dense < 0.5
    assert all(0.5 < ratio < 1.5 for ratio in ratios.values()), ratios


def test_the_bandwidth_of_data_parallel_training_is_that_of_the_table() -> None:
    rows = [row for row in paper("diloco").rows if row.what.startswith("data-parallel")]
    assert [row.ratio for row in rows[:3]] == pytest.approx([1.0, 1.0, 1.0], abs=0.1)


def test_an_unknown_paper_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="paper must be one of 'gtopk', 'das'"):
        paper("other")
    assert main(["plan", "--paper", "covenant"]) == 0
    said = capsys.readouterr().out
    assert "published" in said
    assert "598" in said
