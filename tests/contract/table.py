"""Every strategy, in the settings the contract is checked for. A new strategy gets a row here."""

from __future__ import annotations

import thinwire as tw
from thinwire.strategies.base import Strategy

STRATEGIES: list[Strategy] = [
    tw.Silent(),
    tw.AllReduce(),
    tw.AllReduce(overlap="none"),
    tw.AllReduce(overlap="forward"),
    tw.GossipGraD(),
    tw.GossipGraD(rotate=None, exchange="weights+momentum", payload="bf16", average_every=4),
    tw.GossipGraD(payload="int8", share=0.3),
    tw.TopK(density=0.05),
    tw.GTopK(density=0.05, warmup_steps=2),
    tw.OkTopK(density=0.05, payload="bf16"),
]
BY_THE_CLOCK: list[Strategy] = [
    tw.GossipGraD(share="auto"),
    tw.StochasticGradientPush(),
    tw.StochasticGradientPush(payload="bf16", share=0.5),
]
"""Strategies whose messages depend on time, so that no two runs are alike."""
EXACT: list[Strategy] = [s for s in STRATEGIES if isinstance(s, tw.AllReduce)]
"""Strategies that must give what one worker with the whole batch gets."""
