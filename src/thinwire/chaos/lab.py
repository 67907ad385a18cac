"""The same in the lab: every worker on a host of its own, whose path can be cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.chaos.journals import Journals
from thinwire.chaos.outcome import Ended, Outcome, Struck
from thinwire.elastic.journal import VARIABLE
from thinwire.elastic.keys import write_key
from thinwire.hosts.description import Description, parse_fault
from thinwire.lab.run import Job, LabResult, run

PORT = 29600
"""Where every worker listens: a worker that is started again knows how to reach the others."""


def run_in_lab(
    command: Sequence[str], description: Description, folder: Path, *, time_limit_s: float = 600.0
) -> Outcome:
    """Run a script on every host under the faults of the description."""
    journals = folder / "journals"
    journals.mkdir(parents=True, exist_ok=True)
    write_key(folder / "run.key")
    environment = {
        "THINWIRE_KEY_FILE": str(folder / "run.key"),
        "THINWIRE_PORT": str(PORT),
        VARIABLE: str(journals),
    }
    began = time.time()
    result = run(
        Job(
            description=description,
            command=tuple(command),
            environment=environment,
            time_limit_s=time_limit_s,
            keep_going=True,
            faults_from_first_step=True,
        )
    )
    outcome = Outcome(folder, Journals(journals), began, seconds=time.time() - began)
    outcome.journals.poll()
    for host in description.hosts:
        outcome.sites.setdefault(host.site, []).append(host.index)
    outcome.struck = _struck(result)
    timed_out = result.exit_code == 124
    outcome.ended = [
        Ended(each.host, None if timed_out and each.exit_code > 128 else each.exit_code, each.scheduled)
        for each in result.workers
    ]
    done = {str(each.fault) for each in outcome.struck}
    outcome.not_reached = [each for each in description.faults if str(each) not in done]
    return outcome


def _struck(result: LabResult) -> list[Struck]:
    """From the lines that the lab has written, each with its time."""
    found = []
    for line in result.faults:
        seconds, _, words = line.partition(" s: ")
        text = words.removeprefix("end of ")
        if text.partition(":")[0] in ("kill", "pause", "slow", "cut", "heal", "rejoin"):
            at = result.started_at + float(seconds)
            found.append(Struck(at, parse_fault(text), ends=text != words))
    return found
