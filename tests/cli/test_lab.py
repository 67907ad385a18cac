"""`thinwire lab` without a lab: what it offers, what it refuses before anything is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.lab.run import Job, LabResult, WorkerExit


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Labs are not made; what would have run in them is kept."""
    seen: list[Job] = []

    def run(job: Job) -> LabResult:
        seen.append(job)
        return LabResult(
            exit_code=3,
            seconds=1.5,
            workers=(WorkerExit(host=0, exit_code=3, steps=7, scheduled=False),),
            counters=(),
            faults=(),
            warnings=("the processor was full",),
            busy_share=0.5,
        )

    monkeypatch.setattr("thinwire.cli.lab.run", run)
    return seen


def _options(capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    assert main(["lab", command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines if line.strip().startswith("--")]


def test_options_are_these_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--hosts", "--rate", "--sites", "--uplink"]
    more = ["--slow", "--fault", "--emulate", "--scale", "--time-limit", "--keep-going", "--json"]
    assert _options(capsys, "run") == [*network, *more]
    assert _options(capsys, "check") == [*network, "--megabytes", "--json"]


def test_everything_reaches_the_job(
    jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    line = "lab run --hosts 4 --rate 1gbit*2,100mbit*2 --sites 2+2 --uplink 50mbit --slow 3=0.5"
    line += " --time-limit 1min --fault kill:host=1,step=20 --fault rejoin:host=1,after=9s"
    line += " --emulate resnet20 --scale 0.1 --keep-going"
    assert main([*line.split(), "--", str(script), "--epochs", "3", "--", "x"]) == 3
    (job,) = jobs
    assert job.command == (str(script), "--epochs", "3", "--", "x")
    assert [host.rate_bit_per_s for host in job.description.hosts] == pytest.approx([1e8, 1e8, 1e7, 1e7])
    assert job.description.uplink_bit_per_s == pytest.approx(5e6)
    assert [str(fault) for fault in job.description.faults] == [
        "kill:host=1,step=20",
        "rejoin:host=1,after=9.0",
    ]
    assert job.environment == {"THINWIRE_LAB_EMULATE": "resnet20", "THINWIRE_LAB_SCALE": "0.1"}
    assert (job.time_limit_s, job.keep_going) == (60, True)
    err = capsys.readouterr().err
    assert "lab: 4 hosts at 100mbit and 1gbit, 2 sites with uplinks of 50mbit, slow: host 3 at 0.5" in err
    assert "latency is this machine's own" in err
    assert "compute is emulated: resnet20" in err
    assert "warning: the processor was full" in err


def test_the_outcome_can_be_had_as_json(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", "--json", "--", "true"]) == 3
    assert '"exit_code": 3' in capsys.readouterr().out
    assert jobs[0].command == ("true",)


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        ("lab run --rate 0mbit -- true", 1, "error: rate must be between 8kbit and 100gbit, got '0mbit'"),
        ("lab run --hosts 300 -- true", 1, "error: hosts must be 1 to 254, one address each, got 300"),
        ("lab run --hosts 1000000000 -- true", 1, "error: hosts must be 1 to 100,000, got 1000000000"),
        ("lab run --time-limit 1e9h -- true", 1, "error: time limit must be at most a year (8784h), got"),
        (
            "lab run --emulate params=1e12,forward=1,backward=1 -- true",
            1,
            "of a size that fits: it needs 32,000.0 GB",
        ),
        ("lab run --emulate params=1e30,forward=1,backward=1 -- true", 1, "params must be at most 1e+12"),
        ("lab run --fault kill:host=9,step=1 -- true", 1, "error: fault host must be 0 to 3, got 9"),
        ("lab run --emulate resnet51 -- true", 1, "error: emulate must be one of 'alexnet', "),
        ("lab run --scale 0.1 -- true", 1, "error: scale must be used with --emulate, got 0.1"),
        ("lab run -- no/such.py", 1, "error: command must be a script that exists, got 'no/such.py'"),
        ("lab run --time-limit 60 -- true", 1, "error: time limit must be a time, got '60'"),
        ("lab run", 2, "error: missing argument"),
        ("lab check --hosts 1", 1, "error: hosts must be 2 or more, got 1"),
        ("lab check --megabytes 0", 1, "error: megabytes must be between 1 and 1000, got 0.0"),
    ],
)
def test_bad_input_is_told_before_anything_is_made(
    arguments: str, status: int, error: str, jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == status
    assert error in capsys.readouterr().err
    assert jobs == []
