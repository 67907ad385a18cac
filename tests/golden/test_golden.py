"""Every strategy trains the same bits as when its trajectory was recorded.

`THINWIRE_GOLDEN=write pytest tests/golden` records them anew: do that only for a change that is meant to
change what is trained, and say so in its commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import ADAM, BY_THE_CLOCK, PLAIN_SGD, REPEATABLE
from tests.golden.training import in_threads, on_the_clock, plain_torch

FILE = Path(__file__).with_name("trajectories.json")
KINDS = {
    **dict.fromkeys((*REPEATABLE, *BY_THE_CLOCK), "momentum"),
    **dict.fromkeys(PLAIN_SGD, "plain"),
    **dict.fromkeys(ADAM, "adam"),
}
STRATEGIES = {**REPEATABLE, **PLAIN_SGD, **ADAM, **BY_THE_CLOCK}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


@pytest.fixture(autouse=True, scope="module")
def the_same_arithmetic() -> None:
    """Another processor or torch may sum in another order: there the recorded bits mean nothing."""
    plain = plain_torch()
    if os.environ.get("THINWIRE_GOLDEN") == "write":
        FILE.write_text(json.dumps({**recorded(), "plain torch": plain}, indent=1, sort_keys=True) + "\n")
    elif plain != recorded()["plain torch"]:
        pytest.skip("this machine computes other bits than the one the trajectories were recorded on")


def compare(name: str, rows: list[dict[str, Any]]) -> None:
    if os.environ.get("THINWIRE_GOLDEN") == "write":
        FILE.write_text(json.dumps({**recorded(), name: rows}, indent=1, sort_keys=True) + "\n")
        return
    assert rows == recorded()[name]


@pytest.mark.parametrize("name", [*REPEATABLE, *PLAIN_SGD, *ADAM])
def test_threads_train_the_recorded_bits(name: str) -> None:
    compare(f"{name}, threads", in_threads(STRATEGIES[name], KINDS[name]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_clock_trains_the_recorded_bits(name: str) -> None:
    compare(f"{name}, clock", on_the_clock(STRATEGIES[name], KINDS[name]))
