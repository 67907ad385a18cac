"""A lab, where networks are real and slow, trains what the simulator trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.lab.labs import needs_lab
from tests.simulate.test_same_training import worst
from tests.simulate.training import on_the_clock, weights
from thinwire.hosts.description import describe
from thinwire.lab.run import Job, run

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STRATEGIES = [
    tw.GossipGraD(),
    tw.GossipGraD(share=0.1, payload="int8"),
    tw.GTopK(density=0.05),
]
HOSTS = 4


def test_fifty_steps_at_50_mbit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}", prepend=os.pathsep)
    start = weights()
    torch.save((STRATEGIES, start), tmp_path / "task.pt")
    command = (sys.executable, "-m", "tests.lab.fifty_steps", str(tmp_path))
    job = Job(description=describe(hosts=HOSTS, rate="50mbit"), command=command, time_limit_s=240)
    assert run(job).exit_code == 0
    real = [torch.load(tmp_path / f"{rank}.pt") for rank in range(HOSTS)]
    for number, strategy in enumerate(STRATEGIES):
        ours, _ = on_the_clock(strategy, HOSTS, start, dropout=True, batched=True)
        assert worst(ours, [worker[number] for worker in real]) < 1e-9, repr(strategy)
