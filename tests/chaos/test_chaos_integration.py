"""`thinwire chaos` on real processes and in the lab; a split network there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import thinwire
from tests.lab.labs import needs_lab
from thinwire.chaos.lab import run_in_lab
from thinwire.chaos.report import judge
from thinwire.chaos.samples import account
from thinwire.hosts.description import Description, describe

SCRIPT = "tests.chaos.script"


@pytest.mark.processes
@pytest.mark.slow
def test_a_script_under_faults_on_processes(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    faults = ("kill:host=0,after=0.5", "slow:host=1,after=1,speed=0.5,seconds=1", "rejoin:host=0,after=1.5")
    options = [word for fault in faults for word in ("--fault", fault)]
    script = ("-m", SCRIPT, "all-reduce", "16", "3")
    done = thinwire("chaos", "--workers", "3", *options, "--json", "--out", out, "--", *script)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    killed, _, joined = report["faults"]
    assert (killed["how"], killed["noticed_by"]) == ("dead", 2)
    assert (joined["how"], joined["workers"]) == ("joined", 3)
    assert report["samples"]["missing"] == report["samples"]["doubled"] == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


@pytest.mark.processes
def test_a_script_that_is_not_elastic_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('hello')\n")
    out = tmp_path / "out"
    done = thinwire("chaos", "--workers", "2", "--out", str(out), str(script))
    assert done.returncode == 1
    assert "elastic=True" in done.stderr
    assert (out / "worker-0.log").read_text() == "hello\n"


def split(*, lasts_s: float) -> Description:
    """Four hosts; the last one is cut off."""
    fault = f"cut:site=1,after=0.5,seconds={lasts_s}"
    return describe(hosts=4, rate="1gbit", sites="3+1", uplink="1gbit", faults=[fault])


@pytest.mark.lab
@pytest.mark.slow
@needs_lab
def test_the_minority_of_a_split_network_stops_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", SCRIPT, "all-reduce", "12", "1.5"]
    outcome = run_in_lab(command, split(lasts_s=60.0), tmp_path, time_limit_s=90.0)
    assert [(each.host, each.code) for each in outcome.ended] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    said = "".join(capfd.readouterr())
    assert "reaches only 1 of 4 workers" in said
    assert "no majority: it stops" in said
    report = judge(outcome)
    assert [each.workers for each in report.faults] == [3]
    assert report.samples.right
    assert report.models == 1


@pytest.mark.lab
@pytest.mark.slow
@needs_lab
def test_a_minority_that_may_go_on_is_a_fork_that_never_merges(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", SCRIPT, "all-reduce", "16", "1.5", "allow-minority"]
    outcome = run_in_lab(command, split(lasts_s=9.0), tmp_path, time_limit_s=90.0)
    assert [each.code for each in outcome.ended] == [0, 0, 0, 0]
    said = "".join(capfd.readouterr())
    assert "the two worlds never merge" in said
    last = {each.host: list(each.of("trains"))[-1].facts for each in outcome.journals.workers}
    assert len({last[host]["lineage"] for host in range(3)}) == 1
    assert last[3]["lineage"] != last[0]["lineage"], "the network healed long before the end"
    assert (last[0]["world_size"], last[3]["world_size"]) == (3, 1)
    found = account(outcome.journals.workers, last[0]["lineage"])
    assert found.right, found.examples
    assert found.epochs == 16
