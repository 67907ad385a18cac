"""Every tensor of a model is averaged, whatever its size, and however buckets and fragments are cut."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_threads
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane


@st.composite
def shapes_and_strategies(draw: st.DrawFn) -> tuple[list[int], int, int, Strategy]:
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    workers = draw(st.sampled_from([2, 4]))
    interval = draw(st.integers(1, 5))
    fragments, delay = draw(st.integers(1, interval)), draw(st.integers(0, interval))
    diloco = tw.DiLoCo(interval=interval, fragments=fragments, outer_lr=1.0, outer_momentum=0.0)
    strategy: Strategy = draw(
        st.sampled_from(
            [
                tw.SASGD(interval=interval),
                tw.PartialAveraging(interval=interval, fragments=fragments, delay=delay),
                tw.PostLocal(exact_steps=0, interval=interval),
                replace(diloco, delay=delay),
                replace(diloco, pattern="sequential"),
                replace(diloco, delay=delay, payload="bf16"),
                replace(diloco, delay=delay, payload="int8"),
                replace(diloco, payload="int4"),
                replace(diloco, density=0.5),
                replace(diloco, quorum=0.99),
                replace(diloco, merge="samples", offload=True),
                tw.HierarchicalAveraging(inner_interval=1, interval=interval, groups=1),
                tw.HierarchicalAveraging(inner_interval=1, interval=interval, groups=2),
                tw.HierarchicalAveraging(interval=interval, groups=2, inside="gradients"),
            ]
        )
    )
    return sizes, workers, draw(st.integers(8, 2000)), strategy


@given(case=shapes_and_strategies())
@settings(max_examples=80, deadline=None)
def test_every_tensor_is_averaged(case: tuple[list[int], int, int, Strategy]) -> None:
    """Workers begin with models of their own; whatever is rounded or left out in one round comes later."""
    sizes, workers, bucket_bytes, strategy = case

    def train(lane: LocalLane) -> list[Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=bucket_bytes) as link:
            with torch.no_grad():
                for parameter in model:
                    parameter.fill_(1.0 + 2 * lane.rank)
            for _ in range(8 * strategy.period):
                sum(p.sum() for p in model).backward()
                optimizer.step()
            link.synchronize()
            return [p.detach().clone() for p in model]

    exact = getattr(strategy, "codec", None) is None
    for weights in run_threads(workers, train):
        for weight in weights:
            assert torch.allclose(weight, torch.full_like(weight, workers), rtol=1e-12 if exact else 0.02)
