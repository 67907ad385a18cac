"""Helpers for tests in a lab: a skip mark where labs are not allowed, and a script run on all hosts."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from thinwire.errors import ThinwireError
from thinwire.hosts.description import describe
from thinwire.lab.run import Job, LabResult, enter_command, run

ROOT = Path(__file__).parents[2]


def _reason_not() -> str:
    try:
        enter_command()
    except ThinwireError as problem:
        return problem.message.splitlines()[0]
    return ""


_WHY_NOT = _reason_not()
needs_lab = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


def run_script(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, hosts: int) -> LabResult:
    """Run a script on hosts with paths of 1 Gbit/s; it imports the thinwire under test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=os.pathsep)
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    outcome = run(
        Job(description=describe(hosts=hosts, rate="1gbit"), command=(str(file),), time_limit_s=200)
    )
    assert outcome.exit_code == 0
    return outcome
