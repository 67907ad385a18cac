"""Das's formulas: the values of the paper's examples, and what the command says of them."""

from __future__ import annotations

import pytest

from thinwire.cli import main
from thinwire.errors import SettingError
from thinwire.planner.balance import best_groups, best_groups_real, hybrid_bytes, smallest_conv_batch


def test_the_optimum_is_where_the_derivative_is_zero() -> None:
    best = best_groups_real(4096, minibatch=256, nodes=64)
    assert best == pytest.approx(2.83, abs=0.01)

    def sent(groups: float) -> float:
        return hybrid_bytes(4096, 4096, minibatch=256, nodes=64, groups=groups)

    assert sent(best) < min(sent(0.99 * best), sent(1.01 * best))
    assert best_groups_real(4096, minibatch=256, nodes=64, overlap=0.0) == pytest.approx(2.0)


def test_groups_divide_the_nodes_and_ends_are_pure() -> None:
    assert 64 % best_groups(4096, 4096, minibatch=256, nodes=64) == 0
    assert best_groups(64, 64, minibatch=100_000, nodes=8) == 8  # activations are larger than the weights
    assert best_groups(4096, 100_000, minibatch=1, nodes=8) == 1


def test_a_smaller_output_needs_a_larger_batch() -> None:
    large, small = (smallest_conv_batch(2e12, 1.25e9, outputs=side * side) for side in (56, 7))
    assert small == pytest.approx(64 * large)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(SettingError, match="groups must be 1 to 4"):
        hybrid_bytes(8, 8, minibatch=4, nodes=4, groups=5)
    with pytest.raises(SettingError, match="nodes must be a positive whole number"):
        best_groups(8, 8, minibatch=4, nodes=0)


def test_the_plan_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--net", "vgg-a", "--workers", "64", "--strategy", "all-reduce"]) == 0
    assert "Hybrid layers: the largest fully connected one (4096 x 25088)" in capsys.readouterr().out
