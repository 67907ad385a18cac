"""A network that shrinks on emulated hosts: the interfaces count as many bytes fewer as it has parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.labs import needs_lab, run_script

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(400)]

FAMILIES = (
    "all-reduce",
    "gtopk:density=0.05",
    "gossip-grad",
    "sasgd:interval=4",
    "diloco:interval=4",
)
SCRIPT = f"""
    import time, torch
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

    def numel(model):
        return sum(p.numel() for p in model.parameters())

    for text in {FAMILIES!r}:
        strategy = from_text(text)
        torch.manual_seed(0)
        # sixteen inputs and no activation: half of each hidden layer is more than enough
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 800), torch.nn.Linear(800, 800), torch.nn.Linear(800, 8)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        # it has adapted after the first part, and again after the fourth
        steps = strategy.period * max(4, -(-strategy.adapts_in // strategy.period))
        settings = tw.Apoptosis(mode="aggressive", start=3 * steps, every=1000)
        with tw.attach(model, optimizer, strategy, apoptosis=settings) as link:

            def train():
                for _ in range(steps):
                    optimizer.zero_grad()
                    (model(torch.randn(600, 16)) - 1).square().mean().backward()
                    optimizer.step()
                link.synchronize()

            found = []
            for part in range(5):  # connections are made in the first, neurons go after the third
                before = counted(link)
                train()
                found.append((numel(model), (counted(link) - before) / steps))
            control.report([text, link.rank, *found[1], *found[4]])
"""


def test_bytes_fall_as_parameters_do_in_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_script(SCRIPT, tmp_path, monkeypatch, hosts=4)
    assert len(outcome.reports) == 4 * len(FAMILIES)
    wrong = []
    for text, rank, full, before, small, after in outcome.reports:
        assert small < 0.4 * full, text
        if after / before != pytest.approx(small / full, rel=0.06):
            wrong.append(
                f"{text} on worker {rank}: {before:.0f} bytes per step before and {after:.0f} after, with "
                f"{full} and {small} parameters"
            )
    assert not wrong, "\n".join(wrong)
