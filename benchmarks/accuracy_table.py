"""Make the planner's table of accuracy from measured trainings.

    python -m benchmarks.accuracy_table

Reads the runs in benchmarks/results/{fidelity,held_out,map}-*.json, holds each strategy against exact SGD
with the same recipe, workers, batch and epochs, and writes src/thinwire/strategies/accuracy.json. Of a
setting that was measured several times, with a strategy that has changed since, the newest file counts.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import RESULTS, note, parser_of, print_head, print_row
from thinwire.engine.optimizer import is_normalised
from thinwire.errors import SettingError
from thinwire.planner.accuracy import standard_error, without_lead_in
from thinwire.recipes import registry as recipes
from thinwire.recipes.base import TrainingPlan
from thinwire.strategies import registry
from thinwire.strategies.base import LONGEST_STEP
from thinwire.strategies.measured import TABLE

USUAL = {"accuracy": 0.25, "perplexity": 0.5}
"""Standard deviation of single runs, in points or percent (docs/simulator.md)."""
FEW_SAMPLES = {"digits-cnn": 0.65, "digits-wide": 0.65}
"""The same where the test set is small: of 360 samples, one is 0.28 points, and chance alone gives this."""
Setting = tuple[str, int, int, int, str]
"""Recipe, workers, batch, epochs, metric."""


def main() -> None:
    parser_of(__doc__).parse_args()
    kinds = ("fidelity", "held_out", "map")
    runs = _runs([file for kind in kinds for file in sorted(RESULTS.glob(f"{kind}-*.json"))])
    rows = []
    print_head("recipe", "workers", "strategy", "loss", "error", "runs")
    for setting, by_strategy in runs.items():
        exact = by_strategy.get("all-reduce", {})
        if not exact:
            continue
        reference = [run for file in exact.values() for run in file]
        for text, by_file in by_strategy.items():
            file, own = list(by_file.items())[-1]
            row = None if text == "all-reduce" else _row(setting, text, file, own, reference)
            if row is not None:
                rows.append(row)
                shown = (row["workers"], text, f"{row['loss']:.2f}", f"{row['error']:.2f}", row["seeds"])
                print_row(row["recipe"], *shown)
    made = {"made by": "python -m benchmarks.accuracy_table", "rows": rows}
    TABLE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    note(f"{len(rows)} rows in {TABLE}")


def _runs(files: list[Path]) -> dict[Setting, dict[str, dict[str, list[dict[str, Any]]]]]:
    """By setting, strategy and file: runs without faults, slow hosts and data of their own."""
    found: dict[Setting, dict[str, dict[str, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for file in files:
        for run in json.loads(file.read_text())["runs"]:
            usual = (
                not run.get("slow") and run.get("shuffle", "dealt") == "dealt" and ":" not in run["recipe"]
            )
            usual = usual and run.get("longest", LONGEST_STEP) == LONGEST_STEP
            if usual and run.get("value") is not None:
                key = (run["recipe"], run["workers"], run["batch_size"], run["epochs"], run["metric"])
                found[key][run.get("trained", run["strategy"])][file.name].append(run)
    return found


def _row(
    setting: Setting, text: str, file: str, runs: list[dict[str, Any]], exact: list[dict[str, Any]]
) -> dict[str, Any] | None:
    recipe, workers, _, epochs, metric = setting
    name, given = registry.parse(text)
    try:
        strategy = registry.build(name, given)
    except SettingError as error:  # measured with settings that it no longer has
        note(f"left out: {text} in {file}: {error.message}")
        return None
    seeds = {run["seed"] for run in runs}
    same = [run for run in exact if run["seed"] in seeds]  # single runs differ by more than means do
    # the same training may be in two files
    reference = [value for _, value in sorted({(run["seed"], run["value"]) for run in same or exact})]
    values = [run["value"] for run in runs]
    if metric == "accuracy":
        loss, scale = 100 * (mean(reference) - mean(values)), 100.0
    else:
        loss, scale = 100 * (mean(values) / mean(reference) - 1), 100 / mean(reference)
    errors = ([scale * value for value in values], [scale * value for value in reference])
    return {
        "recipe": recipe,
        "metric": metric,
        "workers": workers,
        "epochs": epochs,
        "steps": _num_steps(runs[-1]),
        "strategy": name,
        "settings": without_lead_in(registry.resolved(strategy)),
        "loss": round(loss, 3),
        "error": round(standard_error(*errors, FEW_SAMPLES.get(recipe, USUAL.get(metric, 0.5))), 3),
        "seeds": len(values),
        "source": f"benchmarks/results/{file}",
        "normalised": _is_normalised(recipe),
    }


def _num_steps(run: dict[str, Any]) -> int:
    """Of a whole run; the map has those at the end of each epoch."""
    steps = run["steps"]
    return int(steps[-1] if isinstance(steps, list) else steps)


@functools.cache
def _is_normalised(recipe: str) -> bool:
    """Whether a recipe's optimizer makes steps of one size, such as AdamW."""
    training = recipes.get(recipe).training()
    plan = TrainingPlan(world_size=1, batch_size=1, num_steps=1)
    return is_normalised(training.optimizer(training.model(), plan))


if __name__ == "__main__":
    main()
