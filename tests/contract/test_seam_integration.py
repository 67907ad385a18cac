"""The seam where it counts: Gloo processes, whose jobs must end with exit code 0."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.contract import seam
from tests.contract.test_seam import check_hierarchical, check_server
from tests.worlds import run_processes

EXAMPLES = 200


def everything(world_size: int) -> dict[str, Any]:
    """All checks in one world, since processes take long to start."""
    found: dict[str, Any] = {"phases": seam.phases_in_order(None, world_size, EXAMPLES)}
    if world_size == 4:
        found["hierarchy"] = seam.hierarchical_mean(None)
    found["server"] = seam.parameter_server(None)
    found["threads"] = seam.comes_back_everywhere(None)
    found["main"] = threading.current_thread().name
    return found


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [4])
def test_every_kind_of_algorithm_over_gloo(world_size: int) -> None:
    everyones = run_processes(world_size, everything, world_size)  # which fails unless all exit with 0
    assert all(each["phases"] >= EXAMPLES for each in everyones)
    check_hierarchical([each["hierarchy"] for each in everyones])
    check_server([each["server"] for each in everyones])
    for each in everyones:
        assert all(names == {each["main"]} for names in each["threads"].values())
