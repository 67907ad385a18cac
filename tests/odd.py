"""JSON with one odd value in it, for readers that must not stumble."""

from __future__ import annotations

import random
from typing import Any

ODD: list[Any] = [
    None, True, -1, 0, 1, 10**9, 2**63, 10**400, 0.5, -1e300, 1e38, float("nan"), float("inf"),
    "", "x", "<b>", "\ud800", "../../x", "2024", [], [[]], [-1], [10**9, 10**9], [0, 2**62], ["ab"],
    {}, {"a": {"b": []}}, {"dict": 1}, {"dict": [[[], 1]]}, {"tensor": "x"}, {"os": "system"},
]  # fmt: skip


def mutate(value: Any, dice: random.Random) -> Any:
    """The same JSON with one value, anywhere in it, replaced by an odd one, or removed."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.15:
        return dice.choice(ODD)
    keys: Any = list(value) if isinstance(value, dict) else range(len(value))
    key, copy = dice.choice(keys), value.copy()
    if dice.random() < 0.1:
        del copy[key]
    else:
        copy[key] = mutate(value[key], dice)
    return copy
