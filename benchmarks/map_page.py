"""Figures and tables of docs/which.md from the map's results: `python -m benchmarks.map_page` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import ROOT, note
from benchmarks.map_figure import NAMES, draw
from benchmarks.map_points import EXACT, MapPoint, points_of, read_runs
from benchmarks.map_run import RATES, MapRun
from thinwire.units import as_ratio, three_digits

DOCS = ROOT / "docs"
PAGE = DOCS / "which.md"
MAY_LOSE = (0.5, 1.0, 2.0)
"""Points of accuracy, or percent of perplexity."""
BLOCK = re.compile(r"(<!-- map: generated -->\n).*?(<!-- map: end -->)", flags=re.DOTALL)


def generated(by_recipe: Mapping[str, Sequence[MapRun]]) -> dict[Path, str]:
    """What every file that is made from the results holds."""
    files, parts = dict[Path, str](), list[str]()
    for recipe, runs in by_recipe.items():
        points = points_of(runs)
        if not points:
            continue
        unit = "points of accuracy lost" if runs[0].metric == "accuracy" else "perplexity, percent more"
        shown = _shown_workers(points)
        figure = DOCS / f"map-{recipe}.svg"
        files[figure] = draw([point for point in points if point.workers == shown], unit)
        parts += [f"## {recipe}", "", _facts(runs, shown), ""]
        parts += [
            f"![{unit} against seconds to accuracy, {recipe}]({figure.name})",
            "",
            *_choices(points),
            "",
        ]
        parts += [*_all_of_them(points, shown), ""]
    text = PAGE.read_text(encoding="utf-8")
    files[PAGE] = BLOCK.sub(lambda match: match[1] + "\n".join(parts) + match[2], text)
    return files


def _shown_workers(points: Sequence[MapPoint]) -> int:
    counts = sorted({point.workers for point in points})
    return 8 if 8 in counts else counts[-1]


def _facts(runs: Sequence[MapRun], shown: int) -> str:
    run = next(run for run in runs if run.workers == shown)
    seeds = len({run.seed for run in runs})
    return (
        f"{run.num_parameters / 1e6:.3g} M parameters, {run.epochs} epochs, {run.steps[-1]:,} steps of "
        f"{run.compute_s * 1e3:g} ms, {run.batch_size * run.workers} samples a step over all workers, "
        f"{seeds} seed{'s' if seeds > 1 else ''}; figure and second table with {shown} workers. "
        "Trained on: " + ", ".join(sorted({run.device for run in runs})) + "."
    )


def _choices(points: Sequence[MapPoint]) -> list[str]:
    """The first at its target among those that lose little, by workers, rate and what little is."""
    lines = [
        "| workers | rate | all-reduce, s to 90 % | "
        + " | ".join(f"first of those that lose at most {may_lose:g}" for may_lose in MAY_LOSE)
        + " |",
        "|" + " --- |" * (3 + len(MAY_LOSE)),
    ]
    for workers in sorted({point.workers for point in points}):
        for rate in RATES:
            here = [point for point in points if (point.workers, point.rate) == (workers, rate)]
            exact = next((point for point in here if point.strategy == EXACT), None)
            if exact is None or exact.to_target_s[0] is None:
                continue
            choices = [_first(here, exact.to_target_s[0], may_lose) for may_lose in MAY_LOSE]
            cells = [str(workers), NAMES[rate], three_digits(exact.to_target_s[0]), *choices]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _first(points: Sequence[MapPoint], exact_s: float, may_lose: float) -> str:
    """Who is first at 90 % among those that lose no more than this, and how many times sooner."""
    times = {p.strategy: p.to_target_s[0] for p in points if p.lost <= may_lose}
    there = {strategy: seconds for strategy, seconds in times.items() if seconds is not None}
    best = min(there, key=lambda strategy: there[strategy])
    return f"`{best}`" + (f", {as_ratio(exact_s / there[best])}" if best != EXACT else "")


def _all_of_them(points: Sequence[MapPoint], workers: int) -> list[str]:
    """Every strategy, with its times at all rates."""
    head = ["strategy", "lost", "bytes", *(f"{NAMES[rate]}: s to 90 % / 99 %" for rate in RATES)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    here = [point for point in points if point.workers == workers]
    by_strategy = {s: [p for p in here if p.strategy == s] for s in dict.fromkeys(p.strategy for p in here)}
    for strategy, own in sorted(by_strategy.items(), key=lambda item: min(p.lost for p in item[1])):
        lost = sorted({f"{point.lost:+.1f}" for point in own}, key=float)
        sent = [_percent(share) for share in sorted(point.sent_share for point in own)]
        times = {point.rate: _times(point) for point in own}
        cells = [f"`{strategy}`", " to ".join(dict.fromkeys((lost[0], lost[-1])))]
        cells += [" to ".join(dict.fromkeys((sent[0], sent[-1]))), *(times.get(rate, "") for rate in RATES)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def _times(point: MapPoint) -> str:
    return " / ".join("never" if each is None else three_digits(each) for each in point.to_target_s)


def main() -> None:
    for path, text in generated(read_runs()).items():
        path.write_text(text, encoding="utf-8")
        note(str(path.relative_to(ROOT)))


if __name__ == "__main__":
    main()
