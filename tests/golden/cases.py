"""The strategies and settings whose trajectories are recorded, by names that outlive renames in the code."""

from __future__ import annotations

import thinwire as tw
from thinwire.strategies.base import Strategy

REPEATABLE: dict[str, Strategy] = {
    "silent": tw.Silent(),
    "all-reduce": tw.AllReduce(),
    "all-reduce none": tw.AllReduce(overlap="none"),
    "all-reduce forward": tw.AllReduce(overlap="forward"),
    "gossip": tw.GossipGraD(),
    "gossip hypercube": tw.GossipGraD(topology="hypercube", rotate=7),
    "gossip momentum bf16 averaged": tw.GossipGraD(
        rotate=None, exchange="weights+momentum", payload="bf16", average_every=4
    ),
    "gossip int8 share": tw.GossipGraD(payload="int8", share=0.3),
    "gossip bf16 share averaged": tw.GossipGraD(payload="bf16", share=0.1, average_every=8),
    "topk": tw.TopK(density=0.05),
    "topk bf16 warm-up": tw.TopK(density=0.02, payload="bf16", warmup_steps=12),
    "gtopk": tw.GTopK(density=0.05),
    "gtopk warm-up": tw.GTopK(density=0.02, warmup_steps=12),
    "gtopk paper": tw.GTopK(density=0.05, complete=False),
    "gtopk exact clipped": tw.GTopK(density=0.05, exact=True, clip_norm=0.5),
    "gtopk bf16": tw.GTopK(density=0.05, payload="bf16"),
    "gtopk keep rate": tw.GTopK(density=0.05, keep_rate=True),
    "oktopk": tw.OkTopK(density=0.05),
    "oktopk bf16": tw.OkTopK(density=0.05, payload="bf16"),
    "sasgd": tw.SASGD(interval=3),
    "diloco": tw.DiLoCo(interval=3),
    "diloco streaming": tw.DiLoCo(interval=4, fragments=2, delay=2, payload="int4"),
    "diloco peers": tw.DiLoCo(interval=2, gossip=True),
    "trickle signs": tw.Trickle(interval=4),
    "trickle largest": tw.Trickle(interval=4, density=0.1),
    "hierarchical averaging": tw.HierarchicalAveraging(interval=4, inner_interval=2, groups=1),
}
"""Trained in threads and on the virtual clock: the bits do not depend on time."""
PLAIN_SGD: dict[str, Strategy] = {
    "topk momentum": tw.TopK(density=0.05, momentum=0.9),
    "gtopk momentum": tw.GTopK(density=0.05, momentum=0.9, warmup_steps=6),
}
"""The same, with an optimizer that has no momentum of its own."""
ADAM: dict[str, Strategy] = {
    "gossip adam moments": tw.GossipGraD(exchange="weights+momentum", share=0.5),
    "all-reduce adam": tw.AllReduce(),
}
BY_THE_CLOCK: dict[str, Strategy] = {
    "gossip auto": tw.GossipGraD(share="auto"),
    "push-sum": tw.StochasticGradientPush(),
    "push-sum bf16 share": tw.StochasticGradientPush(payload="bf16", share=0.5),
    "push-sum int8": tw.StochasticGradientPush(payload="int8"),
}
"""Trained on the virtual clock alone: what they send depends on the time."""
