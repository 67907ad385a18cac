"""A simulation that is saved between two epochs and continued gives the bits of one that never stopped."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.errors import SettingError, UsageError
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.virtual import VirtualCluster, VirtualTraining, virtual_training
from thinwire.strategies import registry as strategies

STRATEGIES = (
    "all-reduce",
    "gossip-grad:exchange=weights+momentum:share=0.3",
    "stochastic-gradient-push",
    "topk:density=0.05",
    "gtopk:density=0.05:warmup_steps=10",
    "oktopk:density=0.05",
    "sasgd:interval=5",
    "diloco:interval=5:fragments=2:delay=1:payload=int4",
    "diloco:interval=3:gossip=true",
    "trickle",
    "partial-averaging:interval=4",
    "post-local:exact_steps=7:interval=4",
    "hierarchical-averaging:groups=2:interval=4",
    "downpour",
    "easgd:interval=3",
)
"""One of each name, with the settings that have the most to save."""


def config(strategy: str, *, shuffle: str = "dealt") -> RunConfig:
    choices: dict[str, Any] = {"workers": 4, "epochs": 2, "batch_size": 64, "device": "cpu"}
    return resolve("digits-cnn", strategy, shuffle=shuffle, **choices)


def cluster(*faults: str) -> VirtualCluster:
    description = describe(hosts=4, rate="20mbit", faults=faults, slow=["1=0.8"])
    return VirtualCluster(description=description, latency_s=0.001, compute_s=0.01, jitter=0.1)


def train(settings: RunConfig, saved: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """Everything a run ends with, and the run as saved after its first epoch of this process."""
    with virtual_training(registry.get("digits-cnn"), settings, cluster()) as training:
        if saved:
            training.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        training.epoch()
        file = io.BytesIO()
        torch.save(training.state_dict(), file)
        while not training.done:
            training.epoch()
        return facts(training), file.getvalue()


def facts(training: VirtualTraining) -> dict[str, Any]:
    result, state = training.result(), training.state_dict()
    parameters = torch.cat([p.flatten() for p in state["learners"]["replicas"]["parameters"].values()])
    # some instruments are means since the start of a process; exposed seconds are added in another order
    summary = replace(result.summary, instruments={}, exposed_share=round(result.summary.exposed_share, 9))
    return {
        "parameters": parameters.numpy().tobytes(),
        "evaluations": training.evaluations,
        "summary": summary,
        "accounts": result.accounts,
        "sent_bytes": training.sent_bytes,
    }


def test_all_names_are_tried() -> None:
    assert {text.split(":")[0] for text in STRATEGIES} | {"silent"} == set(strategies.names())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_continued_run_has_the_same_bits(strategy: str) -> None:
    settings = config(strategy)
    whole, saved = train(settings)
    continued, _ = train(settings, saved)
    assert continued == whole


def test_without_the_saved_optimizers_the_bits_differ() -> None:
    """The comparison above can fail."""
    settings = config("all-reduce")
    whole, saved = train(settings)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    for optimizer in state["learners"]["optimizers"]:
        optimizer["state"] = {}
    file = io.BytesIO()
    torch.save(state, file)
    continued, _ = train(settings, file.getvalue())
    assert continued["parameters"] != whole["parameters"]


def test_what_cannot_be_saved_is_told() -> None:
    ring = config("all-reduce", shuffle="ring")
    with virtual_training(registry.get("digits-cnn"), ring, cluster()) as training:
        training.epoch()
        with pytest.raises(SettingError, match="shuffle must be 'dealt' or 'own'"):
            training.state_dict()
    faulty = cluster("slow:host=2,step=1,speed=0.5")
    told = pytest.raises(UsageError, match="faults cannot be saved")
    with virtual_training(registry.get("digits-cnn"), config("all-reduce"), faulty) as training, told:
        training.state_dict()
