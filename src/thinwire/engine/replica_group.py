"""Workers that hold the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import Task
from thinwire.engine.endpoint import Endpoint

Ranks = tuple[int, ...] | None
"""Workers that hold the same parameters; None: all workers."""


@dataclass(slots=True)
class ReplicaGroup:
    """Such workers, their parameters, and this worker's state of the strategy for them."""

    endpoint: Endpoint
    ranks: Ranks
    buckets: Sequence[ParameterBucket]
    state: Any
    serving: Task | None = None
    """The coroutine that answers others, if one runs."""
