"""Draws layer widths over epochs from a result of `benchmarks.apoptosis`, for the page of its docs.

python -m benchmarks.apoptosis_picture benchmarks/results/apoptosis-....json mnist-mlp docs/apoptosis.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

COLOURS = ("#0b62a4", "#d9541e", "#0b8a6a", "#8a3c9c")


def main() -> None:
    result, problem, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    runs = json.loads(result.read_text())["runs"]
    run = next(r for r in runs if (r["problem"], r["method"]) == (problem, "adaptive") and r["events"])
    first = next(r for r in runs if r["problem"] == problem and r["method"] == "none")
    events, last = run["events"], run["curve"][-1]
    epochs = last["epoch"]
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for number, (colour, layer) in enumerate(zip(COLOURS, list(events[0]["widths"])[:-1], strict=False)):
        places = [event["step"] / run["steps"] * epochs for event in events]
        widths = [event["widths"][layer] for event in events]
        whole = events[0]["before"][layer]
        axes.step(
            [0, *places, epochs],
            [whole, *widths, widths[-1]],
            where="post",
            color=colour,
            label=f"hidden layer {number + 1}",
        )
    axes.set(xlabel="epochs", ylabel="neurons", ylim=(0, None), xlim=(0, epochs))
    finals = first["final"], run["final"]
    axes.set_title(
        f"{problem}: {run['parameters'][0]:,} to {run['parameters'][1]:,} parameters\n"
        f"on test data {finals[0]:.4f} without apoptosis, {finals[1]:.4f} with it",
        fontsize=9,
    )
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
