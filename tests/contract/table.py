"""Every strategy, in the settings the contract is checked for. A new strategy gets a row here."""

from __future__ import annotations

import thinwire as tw
from thinwire.strategies.base import Strategy

STRATEGIES: list[Strategy] = [
    tw.Silent(),
    tw.AllReduce(),
    tw.AllReduce(overlap="none"),
    tw.AllReduce(overlap="forward"),
]
EXACT: list[Strategy] = [s for s in STRATEGIES if isinstance(s, tw.AllReduce)]
"""Those that must give what one worker with the whole batch gets."""
