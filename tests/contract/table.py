"""Every strategy, in the settings the contract is checked for. A new strategy gets a row here."""

from __future__ import annotations

import thinwire as tw
from thinwire.strategies.base import Strategy
from thinwire.strategies.contrib.grouping_sgd import GroupingSGD
from thinwire.strategies.contrib.lasgd import LASGD
from thinwire.strategies.contrib.leader_sgd import LeaderSGD

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
    tw.DiLoCo(interval=3, fragments=3, delay=1, merge="samples", offload=True),
    tw.Trickle(interval=2),
    tw.Trickle(interval=2, density=0.1),
    tw.PartialAveraging(interval=2),
    tw.PostLocal(exact_steps=5, interval=4),
    tw.HierarchicalAveraging(interval=4, inner_interval=2, groups=1),
    tw.HierarchicalAveraging(interval=4, groups=1, inside="gradients"),
]
BY_THE_CLOCK: list[Strategy] = [
    tw.GossipGraD(share="auto"),
    tw.StochasticGradientPush(),
    tw.StochasticGradientPush(payload="bf16", share=0.5),
    tw.DiLoCo(interval=4, quorum=0.5, grace=0.0),
    tw.Trickle(budget="auto"),
    tw.Downpour(),
    tw.EASGD(interval=2),
    LASGD(),
    LeaderSGD(interval=4, inner_interval=2, groups=1),
]
"""Strategies whose messages depend on time or, with LeaderSGD, on numbers: sizes alone do not tell them."""
IN_GROUPS: list[Strategy] = [
    tw.HierarchicalAveraging(interval=4, groups=1, inside="gradients"),
    GroupingSGD(interval=2, measured_steps=2, similar=1.0001),
]
"""Strategies that reduce gradients among some workers: a step that one group leaves out, others make."""
EXACT: list[Strategy] = [s for s in STRATEGIES if isinstance(s, tw.AllReduce)]
"""Strategies that must give what one worker with the whole batch gets."""
