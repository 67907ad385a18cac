"""Something else that is joined to a link and acts between steps."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Companion(Protocol):
    """What `attach` joins to a link beside a strategy; it may reshape the model between steps."""

    def stepped(self) -> None:
        """An optimizer step is over."""

    def observe(self, loss: float | Tensor) -> None:
        """The loss of the step under way, on this worker."""

    def leave(self) -> None:
        """The link is detached."""

    def instruments(self) -> dict[str, float]:
        """Numbers it tells of itself."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...
