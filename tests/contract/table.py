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
    tw.SASGD(interval=4),
    tw.DiLoCo(interval=3, fragments=2, delay=2, payload="int4"),
    tw.DiLoCo(interval=2, gossip=True),
    tw.Trickle(interval=2, density=0.1),
    tw.PartialAveraging(interval=2),
    tw.PostLocal(exact_steps=5, interval=4),
    tw.HierarchicalAveraging(interval=4, inner_interval=2, groups=1),
]
BY_THE_CLOCK: list[Strategy] = [
    tw.GossipGraD(share="auto"),
    tw.StochasticGradientPush(),
    tw.StochasticGradientPush(payload="bf16", share=0.5),
    tw.Downpour(),
    tw.EASGD(interval=2),
]
"""Strategies whose messages depend on time, so that no two runs are alike."""
EXACT: list[Strategy] = [s for s in STRATEGIES if isinstance(s, tw.AllReduce)]
"""Strategies that must give what one worker with the whole batch gets."""
