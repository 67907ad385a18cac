"""The truth of the meter: what the wire says it sends is what the interfaces count, for every operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.labs import needs_lab, run_script

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(300)]

SCRIPT = """
    import time, torch, torch.distributed as dist
    from thinwire.engine.endpoint import Endpoint
    from thinwire.lab.control import Control
    from thinwire.wire.connect import connect
    from thinwire.wire.wire import Meter

    control = Control.from_environment()
    dist.init_process_group("gloo")
    lane, meter = connect(None, timeout_s=60, silence_s=10), Meter()
    endpoint = Endpoint(lane, meter)
    rank, size = lane.rank, lane.world_size
    each = 1_000_000
    whole, part = torch.ones(each * size), torch.ones(each)
    room = torch.empty(each * size)
    operations = {
        "all_reduce": lambda wire: wire.all_reduce_(whole),
        "reduce_scatter": lambda wire: wire.reduce_scatter(whole, torch.empty(each)),
        "all_gather": lambda wire: wire.all_gather(part, room),
        "all_to_all": lambda wire: wire.all_to_all(whole, room),
        "broadcast": lambda wire: wire.broadcast_(part, source=1),
        "exchange": lambda wire: wire.exchange(
            send=part, to=(rank + 1) % size, recv=room[:each], source=(rank - 1) % size
        ),
    }

    def counted():
        dist.barrier()
        time.sleep(0.1)
        sent = control.counters()[rank].sent_bytes
        dist.barrier()
        return sent

    for name, operation in operations.items():
        endpoint.issue(operation).wait()  # connections are made at first use
        stated, before = meter.traffic.sent_bytes, counted()
        endpoint.issue(operation).wait()
        control.report([name, rank, meter.traffic.sent_bytes - stated, counted() - before])
    lane.close()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("hosts", [2, 4, 5])
def test_metered_bytes_are_what_the_interfaces_count(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_script(SCRIPT, tmp_path, monkeypatch, hosts=hosts)
    assert len(outcome.reports) == 6 * hosts
    wrong = []
    for name, rank, metered, counted in outcome.reports:
        # Below a megabyte, acknowledgements of what was received and the barriers weigh too much.
        if metered > 1_000_000 and not 0.95 <= counted / metered <= 1.05:
            wrong.append(f"{name} on worker {rank}: metered {metered}, counted {counted}")
        if metered == 0 and counted > 200_000:
            wrong.append(f"{name} on worker {rank}: metered nothing, counted {counted}")
    assert not wrong, "\n".join(wrong)
