"""Do workers end, and name the culprit, whatever happens to one of them?

    python -m benchmarks.faults --count 300

Draws faults from a seed: what happens, to whom, where in the training, under which strategy. Each trial is a
training with real processes on 2 to 6 emulated hosts at 200 Mbit/s, with attach's own silence and time-out.
Right is: no worker that is left hangs (60 s after the fault), each raises an error that names the culprit,
and its script ends with the exit code it should have.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, note, parser_of, print_head, print_row, result_file
from benchmarks.faults_trials import HARMLESS, HOSTS_PER_SITE, KINDS, NUM_HOSTS, Trial, draw, judge
from thinwire.errors import ThinwireError
from thinwire.hosts.description import describe
from thinwire.lab.run import Job, run

POLL_S = 0.2
PAUSE_S = 2.0
"""Between the starts of labs, which are busy at first."""


def run_lab(trials: Sequence[Trial], folder: Path, problems: list[str]) -> None:
    """Run trials one after another in one lab."""
    (folder / "trials.json").write_text(json.dumps([asdict(trial) for trial in trials]))
    sites = f"{HOSTS_PER_SITE}+{HOSTS_PER_SITE}"
    description = describe(hosts=NUM_HOSTS, rate="200mbit", sites=sites, uplink="200mbit")
    command = ("-m", "benchmarks.faults_host", str(folder))
    try:
        outcome = run(Job(description=description, command=command, environment={"PYTHONPATH": str(ROOT)}))
        if outcome.exit_code:
            problems.append(f"a lab ended with exit code {outcome.exit_code}")
    except ThinwireError as error:
        problems.append(str(error))


def outcomes(trials: Sequence[Trial], folder: Path, num_labs: int) -> Iterator[dict[str, Any]]:
    """The lines of all trials as they end."""
    problems: list[str] = []
    labs = []
    for number in range(num_labs):
        place = folder / f"lab{number}"
        place.mkdir()
        share = trials[number::num_labs]
        thread = threading.Thread(target=run_lab, args=(share, place, problems), daemon=True)
        thread.start()
        labs.append((share, place, thread))
        time.sleep(PAUSE_S)
    waiting = {trial.number: (trial, place, thread) for share, place, thread in labs for trial in share}
    while waiting:
        for trial, place, thread in list(waiting.values()):
            if (place / f"{trial.number}-written-0").exists():
                del waiting[trial.number]
                yield judge(trial, {rank: _events(place, trial, rank) for rank in trial.ranks})
            elif problems or not thread.is_alive():
                raise SystemExit("; ".join(problems) or "a lab ended before its trials")
        time.sleep(POLL_S)


def _events(place: Path, trial: Trial, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / f"{trial.number}-{rank}.log").read_text().splitlines()]


def worst(lines: Sequence[dict[str, Any]], key: str) -> str:
    """The longest time of any worker, in seconds."""
    return f"{max((seconds for line in lines for seconds in line[key].values()), default=0.0):.1f}"


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    print_head("fault", "trials", "hangs", "culprit named by all", "s to the error", "s to the end", "wrong")
    for kind in [*KINDS, "all"]:
        some = [line for line in lines if kind in (line["kind"], "all")]
        hangs = sum(any("hangs" in each for each in line["wrong"]) for line in some)
        harmful = [line for line in some if line["kind"] not in HARMLESS]
        named = [line for line in harmful if not any("name" in w or "nothing" in w for w in line["wrong"])]
        quiet = sum(not line["raised_s"] for line in some)
        told = f"{len(named)} of {len(harmful)}" if harmful else f"no error in {quiet}"
        wrong = sum(bool(line["wrong"]) for line in some)
        print_row(kind, len(some), hangs, told, worst(some, "raised_s"), worst(some, "ended_s"), wrong)


def summary(line: dict[str, Any]) -> str:
    what = f"{line['kind']} of {line['victim']} in {len(line['hosts'])}, {line['phase']}, {line['strategy']}"
    times = f"raised {worst([line], 'raised_s')} s, ended {worst([line], 'ended_s')} s"
    return f"#{line['number']} {what}: {times}, {'; '.join(line['wrong']) or 'right'}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labs", type=int, default=3, help="labs at one time")
    parser.add_argument("--only", default="", help="numbers of trials, with commas between, or a kind")
    parser.add_argument("--keep", type=Path, help="a folder for the output of workers in wrong trials")
    arguments = parser.parse_args()
    trials = draw(arguments.count, arguments.seed)
    if arguments.only:
        chosen = arguments.only.split(",")
        trials = [trial for trial in trials if str(trial.number) in chosen or trial.kind in chosen]
    file, lines = result_file("faults", trial=len(trials) < 300), []
    with tempfile.TemporaryDirectory() as scratch:
        for line in outcomes(trials, Path(scratch), min(arguments.labs, len(trials))):
            lines.append(line)
            note(f"{len(lines)}/{len(trials)} {summary(line)}")
            if line["wrong"] and arguments.keep:
                _keep(Path(scratch), line["number"], arguments.keep)
    lines.sort(key=lambda line: line["number"])
    print_table(lines)
    print(file.save({"seed": arguments.seed}, trials=lines))
    raise SystemExit(1 if any(line["wrong"] for line in lines) else 0)


def _keep(scratch: Path, number: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*scratch.glob(f"lab*/{number}-*.out"), *scratch.glob(f"lab*/{number}-*.log")]:
        shutil.copy(path, folder)


if __name__ == "__main__":
    main()
