"""Faults, rates and calibration in real labs with real training processes."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.lab.labs import needs_lab
from thinwire.hosts.description import describe
from thinwire.lab.calibrate import TOLERANCE, calibrate
from thinwire.lab.run import Job, LabResult, run

pytestmark = [pytest.mark.lab, needs_lab, pytest.mark.timeout(300)]

SOURCE = Path(__file__).parents[2] / "src"

TRAIN = """
    import sys, time, torch
    from thinwire.lab.control import Control
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        time.sleep(0.01)
    Control.from_environment().report([int(__import__("os").environ["RANK"]), time.monotonic() - start])
"""

TALK = """
    import os, socket, time
    from thinwire.lab.control import Control
    control, rank = Control.from_environment(), int(os.environ["RANK"])

    def transfer(number, num_bytes):
        # Host 0 sends, host 1 receives; host 1 says how long it took.
        if rank == 0:
            with socket.create_server(("host0", 5000 + number)) as server:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(bytes(num_bytes))
                    connection.recv(1)
        else:
            start, left = time.monotonic(), num_bytes
            for _ in range(1000):
                try:
                    connection = socket.create_connection(("host0", 5000 + number))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
            with connection:
                while left:
                    left -= len(connection.recv(min(left, 1 << 16)))
                took = time.monotonic() - start
                connection.send(b"x")
            return took

    before = control.counters()[0].sent_bytes
    first = transfer(0, 4_000_000)
    sent = control.counters()[0].sent_bytes - before
    if rank == 1:
        control.set_rate(5e6)
    second = transfer(1, 1_000_000)
    if rank == 1:
        control.set_rate(80e6)
        control.fault("cut:host=0,seconds=1")
    third = transfer(2, 1_000_000)
    if rank == 1:
        control.report({"first": first, "second": second, "third": third, "sent": sent})
"""


EMULATED = """
    import time, torch, torch.distributed as dist
    from thinwire.lab.control import Control
    from thinwire.lab.emulate import EmulatedModel
    from thinwire.lab.nets import parse_net
    dist.init_process_group("gloo")
    net = EmulatedModel(parse_net("params=1000,forward=0.02,backward=0.02"))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    for step in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
    Control.from_environment().report([dist.get_rank(), time.monotonic() - start])
    dist.barrier()
"""


@pytest.fixture(autouse=True)
def ours_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the thinwire under test, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE), prepend=os.pathsep)


def _run(
    folder: Path, script: str, *arguments: str, hosts: int = 2, rate: str = "80mbit", faults: str = ""
) -> LabResult:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    description = describe(hosts=hosts, rate=rate, faults=faults.split())
    return run(Job(description=description, command=(str(path), *arguments), time_limit_s=250))


def test_a_worker_is_killed_at_exactly_its_step_and_comes_back(tmp_path: Path) -> None:
    outcome = _run(tmp_path, TRAIN, "200", faults="kill:host=1,step=7 rejoin:host=1,step=60")
    assert outcome.exit_code == 0
    kept, killed = outcome.workers
    assert (kept.exit_code, kept.steps, kept.starts) == (0, 200, 1)
    assert (killed.exit_code, killed.steps, killed.starts) == (0, 200, 2)
    assert [line.split(": ", 1)[1] for line in outcome.faults] == [
        "kill:host=1,step=7",
        "rejoin:host=1,step=60",
    ]


def test_a_kill_is_no_failure_and_a_fault_not_reached_is_told(tmp_path: Path) -> None:
    outcome = _run(tmp_path, TRAIN, "30", faults="kill:host=0,step=7 kill:host=1,step=31")
    assert outcome.exit_code == 0
    killed, kept = outcome.workers
    assert (killed.exit_code, killed.steps, killed.scheduled) == (137, 7, True)
    assert (kept.exit_code, kept.steps, kept.scheduled) == (0, 30, False)
    assert "fault kill:host=1,step=31 was not reached" in outcome.warnings


def test_a_pause_takes_its_time_and_ends(tmp_path: Path) -> None:
    outcome = _run(tmp_path, TRAIN, "20", faults="pause:host=1,step=3,seconds=1.5")
    assert outcome.exit_code == 0
    took_s = dict(outcome.reports)
    assert took_s[1] >= 1.5
    assert len(outcome.faults) == 2


def test_a_slow_host_and_a_site_cut_off(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(EMULATED))
    description = describe(
        hosts=2,
        rate="100mbit",
        sites="1+1",
        uplink="50mbit",
        faults=["slow:host=1,step=2,speed=0.1", "cut:site=0,step=4,seconds=1.5"],
    )
    outcome = run(Job(description=description, command=(str(script),), time_limit_s=250))
    assert outcome.exit_code == 0
    took_s = dict(outcome.reports)
    # Ten steps of 40 ms: two at full speed, the others ten times slower; and host 0 waits for both.
    assert took_s[1] >= 2 * 0.04 + 8 * 0.4 - 0.1
    assert took_s[0] >= took_s[1] - 1
    assert [line.split(": ")[1].split(",")[0] for line in outcome.faults] == [
        "slow:host=1",
        "cut:site=0",
        "end of cut:site=0",
    ]


def test_rates_cuts_and_counters_while_running(tmp_path: Path) -> None:
    outcome = _run(tmp_path, TALK)
    assert outcome.exit_code == 0
    (found,) = outcome.reports
    # Lower bounds only: a busy machine may be slower than the path, never faster than its bucket allows.
    assert found["first"] >= 0.9 * 4e6 * 8 / 80e6
    assert found["second"] >= 0.9 * 1e6 * 8 / 5e6
    assert found["third"] >= 0.8
    assert 4e6 <= found["sent"] <= 1.1 * 4e6


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("rate", ["50mbit", "200mbit"])
def test_calibration(hosts: int, rate: str) -> None:
    description = describe(hosts=hosts, rate=rate)
    found = calibrate(description, megabytes=10, repeats=2)
    if not found.good:
        found = calibrate(description, megabytes=10, repeats=3)
    assert all(reading.ratio > 1 - TOLERANCE for reading in found.readings)
    assert 1.0 <= found.counted_share < 1.05
    if found.warnings and not found.good:
        pytest.skip(f"too busy to measure on: {found.warnings[0]}")
    # Plain TCP in the same lab says what the machine can do at this moment.
    tcp, *gloo = found.readings
    assert all(reading.ratio < max(1.0, tcp.ratio) + TOLERANCE for reading in gloo)


PARTED = """
    import os, sys, time, torch
    import thinwire as tw
    from thinwire.errors import PeerLost
    from thinwire.lab.control import Control
    control = Control.from_environment()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with tw.attach(model, optimizer, tw.AllReduce(), silence_s=3) as link:
            for step in range(1_000_000):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).mean().backward()
                optimizer.step()
    except PeerLost as error:
        control.report([int(os.environ["RANK"]), error.rank])
        sys.exit(7)
"""


def test_in_a_partition_both_sides_stop_and_name_the_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PARTED))
    sites = {"sites": "1+2", "uplink": "100mbit"}
    description = describe(hosts=3, rate="100mbit", faults=["cut:site=0,step=5"], **sites)
    outcome = run(Job(description=description, command=(str(script),), time_limit_s=200, keep_going=True))
    named = dict(outcome.reports)
    assert named[0] in (1, 2)
    assert (named[1], named[2]) == (0, 0)
    assert [worker.exit_code for worker in outcome.workers] == [7, 7, 7]
