"""Strategies with local steps on emulated hosts: the interfaces count the bytes that each promises."""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from tests.lab.labs import ROOT, needs_lab
from thinwire.hosts.description import Description, describe
from thinwire.lab.run import Job, run

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(400)]

NUMEL = 2_000_000
SCRIPT = """
    import sys, time, torch
    import thinwire as tw
    from thinwire.lab.control import Control
    from thinwire.strategies.registry import from_text

    control = Control.from_environment()
    torch.set_num_threads(1)

    def counted(link):
        link.all_reduce([0.0])
        time.sleep(0.2)
        ports = control.counters()
        link.all_reduce([0.0])
        return ports[link.rank].sent_bytes

    for text in sys.argv[1:]:
        strategy = from_text(text)
        model = torch.nn.Linear(2000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        link = tw.attach(model, optimizer, strategy)
        steps = 2 * strategy.period

        def train():
            for _ in range(steps):
                optimizer.zero_grad()
                (model.weight * torch.randn(1000, 2000)).sum().backward()
                optimizer.step()
            link.synchronize()

        train()  # connections are made at first use
        stated, before = link._core.meter.traffic.sent_bytes, counted(link)
        train()
        after = counted(link)
        stated = (link._core.meter.traffic.sent_bytes - stated) / steps
        control.report([text, link.rank, stated, (after - before) / steps])
        link.detach()
"""


def run_strategies(
    texts: list[str], description: Description, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[tuple[float, float]]]:
    """By strategy and worker: bytes per step as the wire states them, and as interfaces count them."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=os.pathsep)
    file = folder / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    outcome = run(Job(description=description, command=(str(file), *texts), time_limit_s=300))
    assert outcome.exit_code == 0
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for text, _, stated, counted in sorted(outcome.reports):
        found[text].append((stated, counted))
    return found


def test_bytes_are_divided_by_the_interval_and_the_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = 2 * 3 / 4 * 4 * NUMEL  # a ring of four, every step
    expected = {
        "sasgd:interval=1": dense,
        "sasgd:interval=4": dense / 4,
        "partial-averaging:interval=4": dense / 4,
        "diloco:interval=4:fragments=2": dense / 4,
        "diloco:interval=4:payload=bf16": dense / 4 / 2,
        "diloco:interval=2:payload=int8": dense / 2 / 4,
        "diloco:interval=2:payload=int4": dense / 2 / 8,
        "diloco:interval=2:density=0.125": dense / 2 * (2 * 32 + 2) / (4 * 256),
        "trickle:interval=4:density=0.25": dense / 4 * (2 * 64 + 2) / (4 * 256),
    }
    found = run_strategies(list(expected), describe(hosts=4, rate="1gbit"), tmp_path, monkeypatch)
    wrong = []
    for text, promised in expected.items():
        for rank, (stated, counted) in enumerate(found[text]):
            # a scale for every 512 numbers is part of a payload; headers and acknowledgements of one
            for what, number in (("stated", stated), ("counted", counted)):
                if not 0.95 <= number / promised <= 1.05:
                    wrong.append(f"{text} on worker {rank}: {what} {number:.0f}, promised {promised:.0f}")
    assert not wrong, "\n".join(wrong)


def test_a_hierarchy_sends_little_between_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sites of two: inside, a model every step; between them, each worker half of it every fourth."""
    site = 2 * 1 / 2 * 4 * NUMEL  # an all-reduce of two
    between = 2 * 1 / 2 * 4 * (NUMEL / 2)
    inside = 4 * NUMEL / 2 * 2  # reduce-scatter, then all-gather
    promised = (3 * site + inside + between) / 4
    text = "hierarchical-averaging:interval=4"
    two_sites = describe(hosts=4, rate="1gbit", sites="2+2", uplink="100mbit")
    for stated, counted in run_strategies([text], two_sites, tmp_path, monkeypatch)[text]:
        assert stated == pytest.approx(promised, rel=0.05)
        assert counted == pytest.approx(promised, rel=0.05)
