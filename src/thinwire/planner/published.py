"""Papers' published numbers against predictions: ratios are shown, never tuned away.

Numbers and their sources are data files in `papers/`; the functions here only play them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import check_one_of
from thinwire.lab.nets import parse_net
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.predict import Planner
from thinwire.planner.workload import Workload
from thinwire.strategies import registry

FOLDER = Path(__file__).with_name("papers")
WORD = 4
"""Bytes of a number, and of an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One published number and the planner's."""

    what: str
    unit: str
    published: float
    predicted: float
    formula: float | None = None
    """The same by the paper's own alpha-beta formula, where it has one."""

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A paper's table."""

    title: str
    source: str
    rows: tuple[PublishedRow, ...]
    caveats: tuple[str, ...]
    finding: str = ""
    """What the comparison says, in a sentence."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows]}


def _hosts(bit_per_s: float, latency_s: float) -> Cluster:
    hosts = (ClusterHost(name="node", rate_bit_per_s=bit_per_s),)
    return Cluster(hosts=hosts, latency_s=latency_s, ring_segments=1)  # as in the papers' formulas


# -- gTop-k ---------------------------------------------------------------------------------------------


def ring_s(workers: int, numbers: float, alpha_s: float, beta_s: float) -> float:
    """Dense all-reduce: 2 (P - 1) alpha + 2 (P - 1) / P m beta, beta per number.

    >>> round(1e3 * ring_s(4, 25 * 2**20, 0.436e-3, 3.6e-8))
    1418
    """
    return 2 * (workers - 1) * alpha_s + 2 * (workers - 1) / workers * numbers * beta_s


def topk_s(workers: int, selected: float, alpha_s: float, beta_s: float) -> float:
    """All-gather of k values and indices: log2(P) alpha + 2 (P - 1) k beta.

    >>> round(1e3 * topk_s(32, 25 * 2**20 / 1000, 0.436e-3, 3.6e-8), 1)
    60.7
    """
    return math.log2(workers) * alpha_s + 2 * (workers - 1) * selected * beta_s


def gtopk_s(workers: int, selected: float, alpha_s: float, beta_s: float) -> float:
    """Tree and broadcast: 2 log2(P) alpha + 4 k log2(P) beta.

    >>> round(1e3 * gtopk_s(32, 25 * 2**20 / 1000, 0.436e-3, 3.6e-8), 1)
    23.2
    """
    return 2 * math.log2(workers) * alpha_s + 4 * selected * math.log2(workers) * beta_s


def _gtopk(data: Mapping[str, Any]) -> tuple[list[PublishedRow], str]:
    rows = []
    strategies = {"dense": "all-reduce:overlap=none", "topk": "topk", "gtopk": "gtopk:complete=false"}
    alpha_s, beta_s = data["latency_s"], WORD * data["s_per_byte"]
    for name, own in data["models"].items():
        net = parse_net(name)
        planner = Planner(Workload.of_net(net), _hosts(8 / data["s_per_byte"], alpha_s))
        for kind, text in strategies.items():
            strategy = registry.from_text(text)
            for workers, published in zip(data["workers"], own[kind], strict=True):
                selected = data["density"] * net.num_params
                formula = {"dense": ring_s, "topk": topk_s, "gtopk": gtopk_s}[kind]
                size = net.num_params if kind == "dense" else selected
                wire_s = formula(workers, size, alpha_s, beta_s)
                by_formula = net.batch / (net.batch / own["alone"] + wire_s)
                rows.append(
                    PublishedRow(
                        what=f"{name}, {kind}, {workers} workers",
                        unit="samples/s per worker",
                        published=published,
                        predicted=net.batch / planner.play(strategy, workers).step_s,
                        formula=by_formula,
                    )
                )
    dense = [row.ratio for row in rows if ", dense," in row.what]
    return rows, f"the dense baseline could have been {min(dense):.1f} to {max(dense):.1f} times as fast."


# -- Das, DiLoCo, Covenant ------------------------------------------------------------------------------


def _das(data: Mapping[str, Any]) -> tuple[list[PublishedRow], str]:
    rows = []
    for row in data["rows"]:
        planner = Planner(Workload.of_net(parse_net(row["net"])), _hosts(row["bit_per_s"], row["latency_s"]))
        found = planner.predict("all-reduce:overlap=forward", row["nodes"])
        rows.append(
            PublishedRow(what=row["what"], unit="x", published=row["speedup"], predicted=found.speedup)
        )
    return rows, ""


def _diloco(data: Mapping[str, Any]) -> tuple[list[PublishedRow], str]:
    scale = 0.01
    # The engine plays four bytes per number: half as many numbers are as many bits.
    params = data["params"] * scale * data["bits"] / (8 * WORD)
    work = Workload.of_sizes(params, 50, data["step_s"])
    rows = []
    for row in data["rows"]:
        strategy = registry.from_text(row["strategy"])
        for share, published in zip(data["utilisation"], row["gbit_per_s"], strict=True):

            def reached(bit_per_s: float, strategy: Any = strategy) -> float:
                played = Planner(work, _hosts(bit_per_s, 0.0)).play(strategy, data["replicas"])
                return work.compute_s / played.step_s

            low, high = 1e6, 99e9
            while high > 1.01 * low:
                middle = math.sqrt(low * high)
                low, high = (low, middle) if reached(middle) >= share else (middle, high)
            rows.append(
                PublishedRow(
                    what=f"{row['what']}, {share:.0%} utilisation",
                    unit="Gbit/s",
                    published=published,
                    predicted=high / scale / 1e9,
                )
            )
    return rows, ""


def _covenant(data: Mapping[str, Any]) -> tuple[list[PublishedRow], str]:
    message_bits = data["params"] * data["density"] * data["bits_per_entry"]

    def seconds(bits_per_unit: float) -> float:
        down_s: float = (data["peers"] - 1) * message_bits / (bits_per_unit * data["down_stated"])
        up_s: float = message_bits / (bits_per_unit * data["up_stated"])
        return max(down_s, up_s)

    rows = [
        PublishedRow(
            what=f"sending, if the stated units are {name}",
            unit="s",
            published=data["published_s"],
            predicted=seconds(bits),
        )
        for name, bits in (("megabits", 1.0), ("megabytes", 8.0))
    ]
    share = data["compute_s"] / (data["compute_s"] + data["published_s"])
    return rows, (
        f"70 s fit the stated '500 Mb/s down, 110 up' only if these are megabytes: as megabits, sending "
        f"would take {rows[0].predicted:.0f} s and utilisation would not be {share:.0%}."
    )


_PLAYS: Mapping[str, Callable[[Mapping[str, Any]], tuple[list[PublishedRow], str]]] = {
    "gtopk": _gtopk,
    "das": _das,
    "diloco": _diloco,
    "covenant": _covenant,
}


def paper(name: str) -> Paper:
    """A paper's numbers and the planner's."""
    check_one_of("paper", name, _PLAYS)
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows, finding = _PLAYS[name](data)
    return Paper(
        title=data["title"],
        source=data["source"],
        rows=tuple(rows),
        caveats=tuple(data["caveats"]),
        finding=finding,
    )
