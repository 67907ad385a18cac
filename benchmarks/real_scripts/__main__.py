"""Run public training scripts with the fewest lines changed, and compare them with DDP and with themselves.

    python -m benchmarks.real_scripts CHECKOUTS [--only mnist,nanoGPT] [--diff]

CHECKOUTS holds the clones as OWNER/NAME; `--commands` prints how to get them. Each script runs for a few
steps on small data that comes with this benchmark: as it is, and with thinwire, in one process; with DDP, and
with thinwire and several strategies, on 2 workers under torchrun.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import note, parser_of, print_head, print_row, result_file
from benchmarks.real_scripts import examples, others
from benchmarks.real_scripts.run import ALONE, DDP, EXACT, EXACTS, OTHERS, PLAIN, Outcome, run_variant, texts
from benchmarks.real_scripts.script import Script, changes, num_changed
from benchmarks.real_scripts.start import forked, under_torchrun

SCRIPTS = (*examples.SCRIPTS, *others.SCRIPTS)


def commands(scripts: Sequence[Script], checkouts: Path) -> list[str]:
    """How to get the version of each script that was tried."""
    lines = []
    for repository in dict.fromkeys(script.repository for script in scripts):
        clone = checkouts / repository
        lines.append(f"git clone https://github.com/{repository} {clone}")
        for script in (each for each in scripts if each.repository == repository):
            folder = str(Path(script.path).parent)
            lines.append(f"git -C {clone} fetch origin {script.commit}")
            lines.append(f"git -C {clone} checkout {script.commit} -- {folder}")
    return lines


def difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between two runs' losses; infinite if one has more of them."""
    pairs = list(zip(left, right, strict=True))
    if any(len(a) != len(b) or not a for a, b in pairs):
        return math.inf
    every = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=True)]
    return max(abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in every)


def equality(left: Outcome, right: Outcome) -> str:
    """Whether two runs had the same losses."""
    if left.exit_code or right.exit_code:
        return left.why or right.why
    worst = difference(left.losses, right.losses)
    return "same bits" if worst == 0 else f"{worst:.0e}"


def course(outcome: Outcome, script: Script) -> str:
    """The mean loss of the first and of the last quarter, and whether that is training."""
    if outcome.exit_code:
        return outcome.why
    means = outcome.means
    quarter = max(1, len(means) // 4)
    first, last = sum(means[:quarter]) / quarter, sum(means[-quarter:]) / quarter
    good = math.isfinite(last) and (last < first or not script.falls)
    return f"{first:.3g} to {last:.3g}" + ("" if good else " (does not train)")


def row(script: Script, checkouts: Path, outcomes: Mapping[str, Outcome]) -> list[str]:
    small, thinwire, ddp = texts(script, checkouts)
    lines, ddp_lines = (num_changed(small, text) for text in (thinwire, ddp))
    whole = "-"
    if script.whole_batch and not outcomes[EXACT].exit_code:
        whole = f"{difference([outcomes[PLAIN].means], [outcomes[EXACT].means]):.0e}"
    return [
        script.name,
        str(lines),
        "has it" if script.has_ddp else str(ddp_lines),
        equality(outcomes[ALONE], outcomes[PLAIN]),
        *(equality(outcomes[each], outcomes[DDP]) for each in EXACTS),
        whole,
        *(course(outcomes[each], script) for each in (DDP, *OTHERS)),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path, help="folder with the clones, as OWNER/NAME")
    parser.add_argument("--only", default="", help="parts of names of scripts, such as mnist,nanoGPT")
    parser.add_argument(
        "--diff", action="store_true", help="print what is changed in each script, and run nothing"
    )
    parser.add_argument(
        "--commands", action="store_true", help="print how to get the scripts, and run nothing"
    )
    parser.add_argument("--fork", action="store_true", help="fork the workers instead of starting torchrun")
    parser.add_argument("--quick", action="store_true", help="a trial, written to runs/")
    options = parser.parse_args()
    scripts = [each for each in SCRIPTS if any(part in each.name for part in options.only.split(","))]
    if not scripts:
        sys.exit(
            f"--only must be a part of a name, got {options.only!r}; known: "
            + ", ".join(s.name for s in SCRIPTS)
        )
    if options.commands:
        print("\n".join(commands(scripts, options.checkouts)))
        return
    missing = [each for each in scripts if not (options.checkouts / each.repository / each.path).exists()]
    if missing:
        note("not there, and left out: " + ", ".join(script.name for script in missing))
        note("to get them:\n  " + "\n  ".join(commands(missing, options.checkouts)))
    found = [script for script in scripts if script not in missing]
    if not found:
        sys.exit(1)
    for script in found:
        try:
            small, thinwire, _ = texts(script, options.checkouts)
        except LookupError as error:
            tried = "\n  ".join(commands([script], options.checkouts)[1:])
            sys.exit(f"{error.args[0]}: it is not the version that was tried, which you get by\n  {tried}")
        if options.diff:
            print("\n".join(changes(small, thinwire, script.name)))
    if not options.diff:
        sys.exit(measure(found, options.checkouts, fork=options.fork, trial=options.quick))


def measure(scripts: Sequence[Script], checkouts: Path, *, fork: bool, trial: bool) -> int:
    """Run all variants of all scripts and print the table; 1 if one of them failed, other than
    by a refusal in words."""
    result = result_file("real_scripts", trial=trial)
    raw: dict[str, Any] = {}
    failed = False
    equal = ["one worker = plain", *(f"{each} = DDP" for each in EXACTS), "against one process"]
    print_head("script", "lines", "lines with DDP", *equal, *(f"loss: {each}" for each in (DDP, *OTHERS)))
    for script in scripts:
        outcomes = {}
        for variant in (PLAIN, ALONE, DDP, *EXACTS, *OTHERS):
            note(f"{script.name}: {variant} ...")
            outcomes[variant] = run_variant(script, checkouts, variant, forked if fork else under_torchrun)
            if outcomes[variant].exit_code:
                failed = failed or not outcomes[variant].refusal
                note(outcomes[variant].output)
        small, thinwire, _ = texts(script, checkouts)
        raw[script.name] = {
            "commit": script.commit,
            "diff": changes(small, thinwire, script.name),
            "runs": {name: {"exit_code": o.exit_code, "losses": o.losses} for name, o in outcomes.items()},
        }
        print_row(*row(script, checkouts, outcomes))
        note(f"written to {result.save({'forked': fork, 'scripts': raw})}")
    return int(failed)


if __name__ == "__main__":
    main()
