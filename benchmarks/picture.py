"""The picture of the README, drawn from results: `python -m benchmarks.picture` writes docs/speed*.svg."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Panel:
    """Some bars of one cell of a result file of `exact_lab`."""

    title: str
    result: str
    cell: str
    bars: dict[str, str]
    """Labels by system, from top to bottom. "ddp" is DDP with the fastest of its bucket sizes."""

    def shares(self) -> Iterator[tuple[str, bool, float]]:
        """Label, whether it is ours, and speed relative to workers that send nothing."""
        path = ROOT / "benchmarks" / "results" / f"{self.result}.json"
        [table] = json.loads(path.read_text(encoding="utf-8"))["cells"][self.cell]["tables"]
        rows = {row["system"]: row["efficiency"]["median"] for row in table["rows"]}
        for system, label in self.bars.items():
            yield label, system != "ddp", rows[table["best_ddp"] if system == "ddp" else system]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours on a page of one kind."""

    text: str
    quiet: str
    track: str
    rival: str
    ours: str


DDP = "DDP, its best bucket size"
PANELS = (
    Panel(
        title="Exact SGD: 4 workers, 1.25 M parameters",
        result="exact_lab-20261116-145850",
        cell="exact-4",
        bars={
            "ddp": DDP,
            "all-reduce:overlap=backward": "AllReduce()",
            "all-reduce:overlap=forward": 'AllReduce(overlap="forward")',
        },
    ),
    Panel(
        title="Where all-reduce takes too long: 8 workers, 5 M parameters",
        result="exact_lab-20261116-151639",
        cell="sparse-8",
        bars={
            "ddp": DDP,
            "oktopk": "OkTopK()",
            "gtopk": "GTopK()",
            "gossip-grad:share=auto": 'GossipGraD(share="auto")',
            "topk": "TopK()",
        },
    ),
)
THEMES = {
    "speed.svg": Theme(text="#1f2328", quiet="#59636e", track="#eaeef2", rival="#8c959f", ours="#0969da"),
    "speed-dark.svg": Theme(
        text="#e6edf3", quiet="#9198a1", track="#262c36", rival="#6e7681", ours="#4493f8"
    ),
}
WIDTH, LEFT, LENGTH, ROW, THICKNESS = 720, 216, 430, 26, 14
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def draw(theme: Theme) -> str:
    """All panels, one below the other, as SVG."""
    parts, y = list[str](), 20

    def write(text: str, x: float, colour: str, more: str = "") -> None:
        parts.append(f'<text x="{x:g}" y="{y}" fill="{colour}"{more}>{escape(text)}</text>')

    def bar(length: float, colour: str) -> None:
        top = y - THICKNESS + 2
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{THICKNESS}" rx="2" fill="{colour}"/>'
        )

    write(
        "Speed at 200 Mbit/s (emulated hosts, 0.3 s of compute per step); 100 %: nothing is sent",
        0,
        theme.quiet,
    )
    for panel in PANELS:
        y += 34
        write(panel.title, 0, theme.text, ' font-weight="600"')
        for label, ours, share in panel.shares():
            y += ROW
            write(label, LEFT - 12, theme.text, ' text-anchor="end"')
            bar(LENGTH, theme.track)
            bar(LENGTH * share, theme.ours if ours else theme.rival)
            write(f"{share:.0%}".replace("%", " %"), LEFT + LENGTH + 12, theme.text)
    size = f'width="{WIDTH}" height="{y + 14}" viewBox="0 0 {WIDTH} {y + 14}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="13">'
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    for name, theme in THEMES.items():
        (ROOT / "docs" / name).write_text(draw(theme), encoding="utf-8")
