"""Calls that all workers of an elastic link make together between steps, when the workers change meanwhile.

Calls are counted. If the workers change when a call has ended on some of them only, the others are given its
result. Whoever joins is at another place of the program than the others: until all are in the loop over steps
again, each says first where it is, and those in the loop help those in a call, with nothing to add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Call = list[Any]
"""Its kind, its name, and a size."""
IN_LOOP: Call = ["loop", "the loop over steps", 0]


@dataclass(slots=True)
class CommonCalls:
    """What one worker remembers of them."""

    done: int = 0
    """How many have ended."""
    what: Call | None = None
    """The last of them."""
    result: Any = None
    mean_at: int = 0
    """Steps done when all workers last had the same model, by attach or by an average."""
    mixed: bool = False
    """Whether somebody has come since all were last in the loop."""

    @property
    def averaged(self) -> bool:
        """Whether the last one left all workers with one model."""
        return self.what is not None and self.what[0] in ("average", "finish")

    def note(self, what: Call, result: Any) -> None:
        self.done, self.what, self.result = self.done + 1, what, result

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "what": self.what, "result": self.result, "mean_at": self.mean_at}

    def adopt(self, state: dict[str, Any]) -> None:
        self.done, self.what = int(state["done"]), state["what"]
        self.result, self.mean_at = state["result"], int(state["mean_at"])


def next_place(told: list[Call]) -> Call:
    """Where all go first, given where each of them is, in order of rank."""
    return next((each for each in told if each != IN_LOOP), IN_LOOP)
