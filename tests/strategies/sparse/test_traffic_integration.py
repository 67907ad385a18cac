"""Traffic of top-k strategies as played from sizes alone is what the interfaces of the lab count.

The wire's own meter says the same for up to 33 workers, to the byte: test_conservation.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.labs import needs_lab, run_script

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(300)]

SCRIPT = """
    import time, torch, torch.distributed as dist
    import thinwire as tw
    from thinwire.lab.control import Control
    from thinwire.lab.emulate import EmulatedModel
    from thinwire.lab.nets import parse_net
    from thinwire.simulate.sizes import traffic

    # 0.8 MB in a message, so that what is counted are gradients, not beats and acknowledgements
    NET, DENSITY, STEPS = "params=2e6,layers=2,forward=0,backward=0", 0.05, 3
    control = Control.from_environment()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def counted():
        dist.barrier()
        time.sleep(0.1)
        sent = control.counters()[rank].sent_bytes
        dist.barrier()
        return sent

    for strategy in (tw.TopK(density=DENSITY), tw.GTopK(density=DENSITY), tw.OkTopK(density=DENSITY)):
        model = EmulatedModel(parse_net(NET), seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tw.attach(model, optimizer, strategy) as link:

            def train(steps):
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(2, 1)).mean().backward()
                    optimizer.step()

            train(strategy.adapts_in)  # in some of these a bucket goes dense
            before = counted()
            train(STEPS)
            sent = (counted() - before) / STEPS
        shapes = [tuple(p.shape) for p in model.parameters()]
        first, all_ = (
            traffic(shapes, size, strategy, steps=steps)[rank].sent_bytes
            for steps in (strategy.adapts_in, strategy.adapts_in + STEPS)
        )
        control.report([type(strategy).__name__, rank, (all_ - first) / STEPS, sent])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_played_bytes_are_what_the_interfaces_count(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 %, of which nothing is taken off: headers are in it."""
    outcome = run_script(SCRIPT, tmp_path, monkeypatch, hosts=hosts)
    assert len(outcome.reports) == 3 * hosts
    wrong = [
        f"{name} on worker {rank}: played {played:.0f}, counted {counted:.0f}"
        for name, rank, played, counted in outcome.reports
        if not 0.95 <= counted / played <= 1.05
    ]
    assert not wrong, "\n".join(wrong)
