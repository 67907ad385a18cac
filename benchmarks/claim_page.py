"""A result of `sasgd_claim` as a section of docs/sasgd.md: who won, and by how much.

python -m benchmarks.claim_page benchmarks/results/sasgd_claim-DATE.json
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claim_figure import draw
from benchmarks.common import ROOT, note, parser_of
from benchmarks.sasgd_claim import EXACT, MOMENTA, RATES, SYSTEMS, TARGET, ClaimRun, tuned

PAGE = ROOT / "docs" / "sasgd.md"
FIGURE = PAGE.with_name("sasgd_claim.svg")
NAMES = {EXACT: "exact SGD", "sasgd": "SASGD", "downpour": "Downpour", "easgd": "EASGD"}
BEGIN, END = "<!-- claim: generated -->", "<!-- claim: end -->"


def section(result: Mapping[str, Any], file: str) -> str:
    """The section as Markdown."""
    tuning, runs = ([ClaimRun(**run) for run in result[part]] for part in ("tuning", "runs"))
    config = result["config"]
    best = [tuned(tuning, system) for system in SYSTEMS]
    final = {run.system: [r for r in runs if r.settings == run.settings] for run in best}
    means = {system: 100 * statistics.mean(r.value for r in own) for system, own in final.items()}
    text = (
        f"The claim of its paper, replayed ([results](../benchmarks/results/{file}), `python -m "
        f"benchmarks.sasgd_claim`): {config['workers']} workers, interval {config['interval']}, a small "
        f"convolution net on {config['num_images']:,} images of CIFAR-10, {config['epochs']} epochs, batches "
        f"of {config['batch_size']} per worker. Learning rates ({RATES[0]} to {RATES[-1]}) and momentum "
        f"({MOMENTA[0]:g} or {MOMENTA[1]:g}) of each were tuned alike, on another seed, until the rates "
        f"beside the best were worse{_at_the_edge(best)}. EAMSGD's pull was tuned, too (0.9 / P or 0.3). "
        f"{_verdict(means)}"
    )
    lines = [
        BEGIN,
        "## Against Downpour and EAMSGD",
        "",
        textwrap.fill(text, 124, break_on_hyphens=False),
        "",
        f"![Accuracy by learning rate, and by seconds, of all four systems]({FIGURE.name})",
        "",
        "| system | tuned: rate, momentum | accuracy, mean and range | "
        f"seconds to {100 * TARGET:.0f} % of exact SGD's | seconds in all | kB per step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in best:
        own = final[run.system]
        values = [100 * r.value for r in own]
        reached = [at_s for r in own if (at_s := r.reaches(TARGET * means[EXACT] / 100)) is not None]
        to_it = f"{statistics.mean(reached):.1f} ({len(reached)} of {len(own)})" if reached else "never"
        settings = f"{run.rate:g}, {run.momentum:g}{run.more.replace(':', ', ')}"
        lines.append(
            f"| {_name(run)} | {settings} | {statistics.mean(values):.2f} % "
            f"({min(values):.2f} to {max(values):.2f}) | {to_it} | "
            f"{statistics.mean(r.seconds[-1] for r in own if r.seconds):.1f} | "
            f"{statistics.mean(r.sent_bytes_per_step for r in own) / 1e3:.0f} |"
        )
    lines += ["", "Seconds are those of the virtual clock: 100 Mbit/s, 10 ms of compute per step.", END]
    return "\n".join(lines)


def _name(run: ClaimRun) -> str:
    return "EAMSGD" if run.system == "easgd" and run.momentum else NAMES[run.system]


def _at_the_edge(best: Sequence[ClaimRun]) -> str:
    """Which of the tuned rates had only one beside it."""
    names = [_name(run) for run in best if run.rate in (RATES[0], RATES[-1])]
    return f" ({' and '.join(names)}: at the end of the grid)" if names else ""


def _verdict(means: Mapping[str, float]) -> str:
    """Who won, and by how much."""
    first, *others = sorted((system for system in means if system != EXACT), key=lambda s: -means[s])
    names = {"sasgd": "SASGD", "downpour": "Downpour", "easgd": "EAMSGD"}
    ahead = " and ".join(f"{means[first] - means[o]:.1f} points above {names[o]}" for o in others)
    behind = means[EXACT] - means[first]
    exact = f"{abs(behind):.1f} {'below' if behind >= 0 else 'above'} exact SGD"
    return f"**{names[first]} won: {ahead}**, and {exact}."


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("result", type=Path)
    file: Path = parser.parse_args().result
    text = PAGE.read_text(encoding="utf-8")
    result = json.loads(file.read_text(encoding="utf-8"))
    made = section(result, file.name)
    tuning, runs = ([ClaimRun(**run) for run in result[part]] for part in ("tuning", "runs"))
    FIGURE.write_text(draw(tuning, runs, NAMES), encoding="utf-8")
    before, marker, after = text.partition(BEGIN)
    if marker:
        text = before + made + after.partition(END)[2]
    else:
        head, reference, tail = text.rpartition("\nReference: ")
        text = f"{head}\n{made}\n{reference}{tail}"
    PAGE.write_text(text, encoding="utf-8")
    note(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
