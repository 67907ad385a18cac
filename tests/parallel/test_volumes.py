from __future__ import annotations

import pytest

from thinwire.parallel.styles import strip_widths
from thinwire.parallel.volumes import LayerSize, Split, divisors
from thinwire.planner.balance import best_groups_real

FC = LayerSize(in_features=4096, out_features=4096, num_weights=4096 * 4096, rows=4)


def test_volumes_are_those_of_das() -> None:
    """64 workers, 256 samples, 4096 x 4096: data 67 MB one way, model 8.4 MB, 3 groups 5.9 MB (overlap 1)."""
    assert FC.data_bytes(64) / 2 == pytest.approx(67.1e6, rel=0.02)
    # the paper leaves out the way back to rows, which is a group's share of the other way
    assert FC.hybrid_bytes(64, 1, "colwise") == pytest.approx(8.4e6, rel=0.02)
    assert FC.hybrid_bytes(64, 2, "colwise") == pytest.approx(4.2e6 + 2.1e6, rel=0.05)


def test_the_best_of_all_divisors_is_next_to_the_optimum() -> None:
    best = min(divisors(64), key=lambda groups: FC.hybrid_bytes(64, groups, "colwise"))
    assert best / 2 < best_groups_real(4096, minibatch=256, nodes=64) < best * 2


def test_the_narrow_side_goes_to_all() -> None:
    wide = LayerSize(in_features=25088, out_features=4096, num_weights=25088 * 4096, rows=4)
    assert wide.better_split == "rowwise"
    assert wide.hybrid_bytes(16, 2, "rowwise") < wide.hybrid_bytes(16, 2, "colwise")


def test_one_group_per_worker_is_data_parallel() -> None:
    splits: tuple[Split, ...] = ("colwise", "rowwise")
    for split in splits:
        assert FC.hybrid_bytes(16, 16, split) == FC.data_bytes(16)


def test_strips_are_those_of_dtensor() -> None:
    assert strip_widths(5, 4) == [2, 2, 1, 0]
    assert strip_widths(45, 6) == [8, 8, 8, 8, 8, 5]
