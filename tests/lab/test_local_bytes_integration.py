"""Strategies with local steps on emulated hosts: the interfaces count the bytes that each promises."""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from dataclasses import dataclass
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
        ports, uplinks = control.counters(), control.uplinks()
        link.all_reduce([0.0])
        return [ports[link.rank].sent_bytes, *(uplink.sent_bytes for uplink in uplinks)]

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
        per_step = [(end - begin) / steps for end, begin in zip(after, before, strict=True)]
        control.report([text, link.rank, stated, per_step])
        link.detach()
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes per step of one worker."""

    stated: float
    """As the wire states them."""
    counted: float
    """As the worker's interface counts them."""
    between_sites: list[float]
    """As every site's uplink counts those of all its workers."""


def run_strategies(
    texts: list[str], description: Description, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Sent]]:
    """By strategy and worker."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=os.pathsep)
    file = folder / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    outcome = run(Job(description=description, command=(str(file), *texts), time_limit_s=300))
    assert outcome.exit_code == 0
    found: dict[str, list[Sent]] = defaultdict(list)
    for text, _, stated, (counted, *uplinks) in sorted(outcome.reports):
        found[text].append(Sent(stated, counted, uplinks))
    return found


def test_bytes_are_divided_by_the_interval_and_the_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = 2 * 3 / 4 * 4 * NUMEL  # a ring of four, every step
    half = dense / 2  # to the owner of a region; as much comes back, of sparse changes three times as much
    expected = {
        "sasgd:interval=1": dense,
        "sasgd:interval=4": dense / 4,
        "sasgd:interval=5": dense / 5,
        "post-local:exact_steps=4:interval=4": dense / 4,  # the exact steps are over when it is counted
        "partial-averaging:interval=4": dense / 4,
        "diloco:interval=4:fragments=2": dense / 4,
        "diloco:interval=4:payload=bf16": dense / 4 / 2,
        "diloco:interval=2:payload=int8": dense / 2 / 4,
        "diloco:interval=2:payload=int4": dense / 2 / 8,
        "diloco:interval=2:density=0.125": half / 2 * ((2 * 32 + 2) + (2 * 96 + 2)) / (4 * 256),
        "trickle:interval=4:density=0.25": half / 4 * ((2 * 64 + 2) / (4 * 256) + 1 / 4),
    }
    # In fragments and beside training the same is sent, whatever it looks like. (Acknowledgements and headers
    # of a round are about 17 kB, so much smaller messages than these would take more than 5 % for them.)
    for payload, part in {"fp32": 1, "bf16": 2, "int8": 4, "int4": 8}.items():
        expected[f"diloco:interval=4:fragments=2:delay=2:payload={payload}"] = dense / 4 / part
    found = run_strategies(list(expected), describe(hosts=4, rate="1gbit"), tmp_path, monkeypatch)
    wrong = []
    for text, promised in expected.items():
        for rank, sent in enumerate(found[text]):
            # a scale for every 512 numbers is part of a payload; headers and acknowledgements of one
            for what, number in (("stated", sent.stated), ("counted", sent.counted)):
                if not 0.95 <= number / promised <= 1.05:
                    wrong.append(f"{text} on worker {rank}: {what} {number:.0f}, promised {promised:.0f}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("inside", ["models", "gradients"])
def test_a_hierarchy_sends_little_between_sites(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sites of two: inside a model in every step; between them every fourth, of each worker one half."""
    near = 2 * 1 / 2 * 4 * NUMEL  # an all-reduce of two
    half = 2 * 1 / 2 * 4 * (NUMEL / 2)
    collected = 4 * NUMEL / 2 * 2  # reduce-scatter, then all-gather
    steps_near = 3 if inside == "models" else 4  # gradients also in the step that averages all
    within, between = (steps_near * near + collected) / 4, half / 4
    text, flat = f"hierarchical-averaging:interval=4:inside={inside}", "sasgd:interval=4"
    two_sites = describe(hosts=4, rate="1gbit", sites="2+2", uplink="100mbit")
    found = run_strategies([text, flat], two_sites, tmp_path, monkeypatch)
    for sent in found[text]:
        assert sent.stated == pytest.approx(within + between, rel=0.05)
        assert sent.counted == pytest.approx(within + between, rel=0.05)
        assert sent.between_sites == pytest.approx([2 * between] * 2, rel=0.05)
        assert sent.counted - sum(sent.between_sites) / 4 == pytest.approx(within, rel=0.05)
    # one ring over all of them crosses from each site to the other once
    assert found[flat][0].between_sites == pytest.approx([2 * 3 / 4 * 4 * NUMEL / 4] * 2, rel=0.05)
