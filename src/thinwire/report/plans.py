"""Pages and plots of the planner's results: a proposal with its scaling plot, predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.report import drawing
from thinwire.report.drawing import COLOURS, INK, Plot
from thinwire.report.page import STYLE, save, section
from thinwire.report.tables import Html, tag
from thinwire.units import as_bytes, as_percent, as_rate, as_ratio, as_seconds, count

MOST_LINES = 6


def scaling_plot(plan: Mapping[str, Any]) -> Plot:
    """Speed-up against workers of the recommended strategy, exact SGD and others, and the ideal line."""
    plot, counts, ends = _by_workers(plan, "scaling", "Speed-up over one machine", "speedup")
    plot.axes.plot(range(len(counts)), counts, color=INK, linewidth=0.9)
    plot.axes.set_yscale("log", base=2)
    plot.axes.yaxis.set_major_formatter(lambda times, _: f"{times:g}x")
    drawing.end_labels(plot.axes, ends)
    return plot


def efficiency_plot(plan: Mapping[str, Any]) -> Plot:
    """Efficiency against workers of the same strategies: the part of a step that is computing."""
    plot, counts, ends = _by_workers(plan, "efficiency", "Efficiency of a worker", "efficiency")
    plot.axes.plot(range(len(counts)), [1.0] * len(counts), color=INK, linewidth=0.9)
    plot.axes.set_ylim(bottom=0.0)
    plot.axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    drawing.end_labels(plot.axes, ends)
    return plot


def _by_workers(
    plan: Mapping[str, Any], name: str, title: str, quantity: str
) -> tuple[Plot, list[int], list[drawing.Label]]:
    """A line for each of some strategies, with the band that the interval of step times gives for the
    recommended one and exact SGD; also the numbers of workers, and the labels at the ends of lines."""
    about = f"{plan['workload']['name']}, predicted"
    caption = "the thin line is the ideal; bands: as far as the cluster is known"
    plot = drawing.new_plot(name, title, about, caption)
    predictions = [p for p in plan["predictions"] if p["strategy"] != "silent"]
    counts = sorted({p["workers"] for p in predictions})
    first = _first(plan)
    known = [p["strategy"] for p in predictions if p["loss"] is not None]
    names = list(dict.fromkeys([*first, *known, *(p["strategy"] for p in predictions)]))[:MOST_LINES]
    looks = drawing.looks_of([(name, "ours") for name in names])
    ends = list[drawing.Label]()
    for each in names:
        line = sorted((p for p in predictions if p["strategy"] == each), key=lambda p: p["workers"])
        xs = [counts.index(p["workers"]) for p in line]
        ys, look = [p[quantity] for p in line], looks[each]
        if each in first:
            low, high = ([p[quantity] * p["step_s"] / p[key] for p in line] for key in ("high_s", "low_s"))
            ideal = [p[quantity] / p["efficiency"] for p in line]
            plot.axes.fill_between(
                xs, low, [*map(min, high, ideal)], color=look.colour, alpha=0.15, linewidth=0
            )
        plot.axes.plot(xs, ys, color=look.colour, marker=look.marker, linewidth=look.width, markersize=4)
        ends.append((ys[-1], each, look.colour))
    plot.axes.set_xticks(range(len(counts)), [f"{n:,}" for n in counts])
    plot.axes.set_xlabel("workers")
    plot.axes.grid(axis="y")
    return plot, counts, ends


def _first(plan: Mapping[str, Any]) -> list[str]:
    """The recommended strategy, and exact SGD."""
    chosen = plan["recommendation"]["strategy"]
    return list(dict.fromkeys(name for name in (chosen, "all-reduce") if name))


def against_plot(compared: Sequence[Mapping[str, Any]]) -> Plot:
    """Predicted against measured seconds, one dot for each strategy in each cell."""
    caption = "on the line, the prediction is right; the band is 15 %; open dots: the processor was the limit"
    about = f"{len(compared)} cells measured in the lab"
    plot = drawing.new_plot("against", "Predicted and measured seconds per step", about, caption)
    counts = sorted({each["workers"] for each in compared})
    looks = drawing.looks_of([(str(workers), "ours") for workers in counts])
    for each in compared:
        look, full = looks[str(each["workers"])], each["processor_full"]
        [dot] = plot.axes.plot(
            [each["measured_s"]],
            [each["predicted_s"]],
            color=look.colour,
            marker=look.marker,
            markersize=4,
            linestyle="",
            fillstyle="none" if full else "full",
        )
        where = f"{each['strategy']}, {each['workers']} workers, {each['rate']}"
        plot.tip(dot, f"{where}: {each['predicted_s']:.3f} s, measured {each['measured_s']:.3f} s")
    low = min(min(each["measured_s"], each["predicted_s"]) for each in compared) / 1.2
    high = max(max(each["measured_s"], each["predicted_s"]) for each in compared) * 1.2
    band = ([0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high])
    plot.axes.plot([low, high], [low, high], color=INK, linewidth=0.9)
    plot.axes.fill_between([low, high], *band, color=INK, alpha=0.1, linewidth=0)
    ticks = [t for t in _TICKS_S if low <= t <= high]
    for axis, scale in ((plot.axes.xaxis, plot.axes.set_xscale), (plot.axes.yaxis, plot.axes.set_yscale)):
        scale("log")
        axis.set_ticks(ticks, [f"{t:g} s" for t in ticks])
        axis.set_ticks([], minor=True)
    for workers in counts:
        look = looks[str(workers)]
        named = f"{workers} workers"
        plot.axes.plot([], [], label=named, color=look.colour, marker=look.marker, linestyle="")
    plot.axes.legend(frameon=False)
    plot.axes.set_xlabel("measured")
    plot.axes.set_ylabel("predicted")
    plot.axes.grid()
    return plot


_TICKS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


def write_plot(plot: Plot, folder: Path) -> Path:
    """Save a plot as SVG and PNG; gives the PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    save(plot, folder)
    return folder / f"{plot.name}.png"


def write_proposal(plan: Mapping[str, Any], path: Path) -> Path:
    """Write the page that an application for computing time asks for: what, how much, how well it scales."""
    with drawing.style():
        plots = scaling_plot(plan), efficiency_plot(plan)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = [
                tag("figure", tag("h3", plot.title), save(plot, path.parent), tag("figcaption", plot.caption))
                for plot in plots
            ]
            path.write_text(_page(plan, drawn), encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _page(plan: Mapping[str, Any], drawn: Sequence[Html]) -> Html:
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    style = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    work, chosen = plan["workload"], plan["recommendation"]
    title = f"Scaling of {work['name']}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style + STYLE.read_text(encoding="utf-8"))),
    )
    top = tag(
        "header",
        tag("p", "thinwire plan", class_="eyebrow"),
        tag("h1", title),
        tag("p", chosen["reason"], class_="verdict"),
    )
    body = tag(
        "body",
        tag(
            "main",
            top,
            section("What is trained, and on what", tag("dl", *_facts(plan)), name="work"),
            section("Scaling", *drawn, _table(plan), name="scaling"),
            section("How sure this is", *_caveats(plan), name="sure"),
        ),
    )
    return Html("<!doctype html>\n" + tag("html", head, body, lang="en") + "\n")


def _facts(plan: Mapping[str, Any]) -> list[Html]:
    work, cluster = plan["workload"], plan["cluster"]
    rates = [host["rate_bit_per_s"] for host in cluster["hosts"]]
    shown = dict.fromkeys(as_rate(float(f"{rate:.3g}")) for rate in (min(rates), max(rates)))
    samples = "" if work["batch"] is None else f", {count(work['batch'], 'sample')}"
    facts = {
        "model": f"{work['num_params']:,} parameters",
        "computing": f"{as_seconds(work['compute_s'])} per step and worker{samples}",
        "network": f"{' to '.join(shown)} per host, latency {as_seconds(cluster['latency_s'])}",
        "known from": cluster["measured"] or "what was stated; not measured",
        "advice": chosen if (chosen := plan["recommendation"]["strategy"]) else "one machine",
    }
    return [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]


def _table(plan: Mapping[str, Any]) -> Html:
    head = tag("tr", *(tag("th", word) for word in _COLUMNS))
    rows = [
        tag("tr", tag("th", name), *(tag("td", cell) for cell in _cells(p)))
        for name in _first(plan)
        for p in plan["predictions"]
        if p["strategy"] == name
    ]
    return tag("table", tag("thead", head), tag("tbody", *rows))


_COLUMNS = (
    "strategy",
    "workers",
    "seconds per step",
    "efficiency",
    "speed-up",
    "sent per step",
    "points lost",
)


def _cells(p: Mapping[str, Any]) -> list[str]:
    between = f"{p['step_s']:.3g} ({p['low_s']:.3g} to {p['high_s']:.3g})"
    loss = "not measured" if p["loss"] is None else _points(p["loss"])
    speeds = [as_percent(round(p["efficiency"], 2)), as_ratio(p["speedup"])]
    return [f"{p['workers']:,}", between, *speeds, as_bytes(p["sent_bytes"]), loss]


def _points(loss: Mapping[str, Any]) -> str:
    if loss["low"] == loss["high"] == 0:
        return "exact"
    return f"{loss['loss']:.1f} ({loss['low']:+.1f} to {loss['high']:+.1f})"


def _caveats(plan: Mapping[str, Any]) -> list[Html]:
    spread = as_percent(plan["cluster"]["spread"])
    chosen = plan["recommendation"]
    bases = {
        p["loss"]["basis"] for p in plan["predictions"] if p["strategy"] == chosen["strategy"] and p["loss"]
    }
    return [
        tag("p", f"Rates and times may be off by {spread}; intervals in the table are that wide."),
        tag("p", "Predicted on a virtual clock that plays every message; each worker keeps its own batch."),
        *(tag("p", f"Accuracy: {basis}.") for basis in sorted(bases)),
        *(tag("p", f"Passed over: {words}.") for words in chosen["passed_over"]),
    ]
