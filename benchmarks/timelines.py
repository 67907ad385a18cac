"""The pictures at the top of the pages on strategies with local steps: `python -m benchmarks.timelines`.

Time runs to the right. A row is a worker; a box is a step, a bar across rows is something that all these
workers compute together and wait for, an arrow is a message. They show who waits for what, not how long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TEXT, QUIET, STEP, EDGE, OURS = "#1f2328", "#59636e", "#eaeef2", "#afb8c1", "#0969da"
PARTS = ("#0969da", "#8250df", "#1a7f37", "#bc4c00", "#bf3989")
"""Colours of the parts of a model."""
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
WIDTH, LEFT, TOP, ROW, BOX = 760, 120, 16, 34, 22


class Timeline:
    """Rows of steps, in units of pixels to the right of their names."""

    def __init__(self, rows: Sequence[str], note: str, *, gaps: Sequence[int] = ()) -> None:
        """`gaps`: rows with some more room above them."""
        self._tops = [TOP + row * ROW + 12 * sum(row >= gap for gap in gaps) for row in range(len(rows))]
        self.height = self._tops[-1] + ROW + 26
        self._note, self._parts = note, list[str]()
        for name, top in zip(rows, self._tops, strict=True):
            self._text(LEFT - 12, top + 16, name, QUIET, "end")
        self._text(LEFT, self.height - 12, note, TEXT)

    def steps(self, row: int, start: float, length: float, count: int = 1) -> None:
        """Steps one after another."""
        for at in range(count):
            self._box(start + at * length, row, length - 3, STEP, EDGE)

    def message(self, row: int, start: float, length: float, label: str = "", colour: str = OURS) -> None:
        """Something on the wire, on a row of its own."""
        self._box(start, row, length - 3, colour, colour)
        self._text(LEFT + start + length / 2 - 1, self._tops[row] + 15, label, "#ffffff", "middle")

    def part(self, row: int, start: float, length: float, colour: str) -> None:
        """One of several parts of something, side by side."""
        self._box(start, row, length, colour, colour if colour != STEP else EDGE)

    def bar(
        self, rows: Sequence[int], at: float, width: float = 9, colour: str = OURS, label: str = ""
    ) -> None:
        """All these rows together."""
        top, bottom = self._tops[rows[0]] - 3, self._tops[rows[-1]] + BOX + 3
        self._parts.append(
            f'<rect x="{LEFT + at:.0f}" y="{top}" width="{width:.0f}" height="{bottom - top}" rx="3" '
            f'fill="{colour}"/>'
        )
        if label:
            middle = LEFT + at + width / 2
            for line, text in enumerate(label.split("\n")):
                height = (top + bottom) / 2 + 4 + 14 * (line - (label.count("\n")) / 2)
                self._text(middle, height, text, "#ffffff", "middle")

    def arrow(self, start: tuple[float, int], end: tuple[float, int], colour: str = OURS) -> None:
        """A message from a place on a row to one on another."""
        (x, row), (to_x, to_row) = start, end
        down = to_row > row
        y, to_y = self._tops[row] + (BOX if down else 0), self._tops[to_row] + (0 if down else BOX)
        tip = -6 if down else 6
        self._parts.append(
            f'<path d="M{LEFT + x:.0f} {y} L{LEFT + to_x:.0f} {to_y + tip}" stroke="{colour}" '
            f'stroke-width="1.5"/>'
            f'<path d="M{LEFT + to_x - 4:.0f} {to_y + tip} h8 L{LEFT + to_x:.0f} {to_y} z" fill="{colour}"/>'
        )

    def label(self, row: int, at: float, text: str, colour: str = TEXT) -> None:
        self._text(LEFT + at, self._tops[row] + 15, text, colour)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" font-family="{FONT}" font-size="12" role="img">'
        )
        background = f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self._note)}</title>", background, *self._parts, "</svg>\n"])

    def _box(self, start: float, row: int, width: float, fill: str, edge: str) -> None:
        self._parts.append(
            f'<rect x="{LEFT + start:.0f}" y="{self._tops[row]}" width="{width:.0f}" height="{BOX}" rx="3" '
            f'fill="{fill}" stroke="{edge}"/>'
        )

    def _text(self, x: float, y: float, text: str, colour: str, anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
        )


def sasgd() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "worker 2"],
        "Local steps, nothing is sent; then what they changed is summed, and all go on from the same model.",
    )
    at = 0.0
    for _ in range(2):
        end = at + 4 * 50
        for row in range(3):
            picture.steps(row, at, 50, 4)
        picture.bar(range(3), end + 2, 84, label="sum of\nwhat steps\nchanged")
        at = end + 92
    for row in range(3):
        picture.steps(row, at, 50)
    return picture


def diloco() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "worker 2", "wire"],
        "One part of the model after another is averaged beside training, and lands in an outer step.",
        gaps=[3],
    )
    for row in range(3):
        picture.steps(row, 0, 32, 19)
    for turn in range(5):
        start = 96.0 + 96 * turn
        colour = PARTS[turn % len(PARTS)]
        picture.arrow((start, 2), (start + 6, 3), colour)
        picture.message(3, start, 70, "part " + "ABCDE"[turn], colour)
        picture.arrow((start + 60, 3), (start + 66, 2), colour)
        picture.bar(range(3), start + 62, 7, colour)
    return picture


def trickle() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "wire", "due part"],
        "Each step another eighth is due; signs of its changes go out, signs of the sums come back.",
        gaps=[2],
    )
    for row in range(2):
        picture.steps(row, 0, 56, 11)
    for step in range(1, 11):
        part, start = (step - 1) % 8, 56.0 * step
        colour = PARTS[part % len(PARTS)]
        picture.arrow((start - 4, 1), (start + 4, 2), colour)
        picture.message(2, start, 44, "1 bit", colour)
        picture.arrow((start + 40, 2), (start + 48, 1), colour)
        for place in range(8):
            picture.part(3, start + 5.5 * place, 4, colour if place == part else STEP)
    return picture


def hierarchical_averaging() -> Timeline:
    picture = Timeline(
        ["site A  worker 0", "worker 1", "site B  worker 2", "worker 3"],
        "Inside a site an average after every step; between sites seldom, of each worker half a model.",
        gaps=[2],
    )
    at = 0.0
    for step in range(1, 13):
        for row in range(4):
            picture.steps(row, at, 36)
        at += 36
        if step % 4:
            picture.bar([0, 1], at - 2, 6, PARTS[2])
            picture.bar([2, 3], at - 2, 6, PARTS[2])
            at += 8
        else:
            picture.bar(range(4), at - 2, 24)
            at += 27
    return picture


def centre() -> Timeline:
    picture = Timeline(
        ["worker 0", "centre", "worker 1, slower"],
        "A worker sends what it changed (EASGD: its model), goes on, and takes in the answer when it comes.",
        gaps=[1, 2],
    )
    for row, length, colour in ((0, 40, PARTS[1]), (2, 68, PARTS[3])):
        count = int(620 / length)
        picture.steps(row, 0, length, count)
        for asked in range(2 * length, 580, 3 * length):
            picture.arrow((asked, row), (asked + 16, 1), colour)
            picture.arrow((asked + 34, 1), (asked + 50, row), colour)
    picture.message(1, 0, 620, "dealt out over the workers: each answers for its part beside its own steps")
    return picture


def post_local() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "worker 2"],
        "First exact SGD: gradients are averaged in every step. Then local steps, averaged seldom.",
    )
    at = 0.0
    for step in range(1, 15):
        for row in range(3):
            picture.steps(row, at, 32)
        at += 32
        if step <= 6:
            picture.bar(range(3), at - 2, 6, PARTS[2])
            at += 8
        elif (step - 6) % 4 == 0:
            picture.bar(range(3), at - 2, 22)
            at += 25
    return picture


def partial_averaging() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "worker 2", "averaged"],
        "After every step another part of the model is averaged over all workers, in turn.",
        gaps=[3],
    )
    for step in range(9):
        start, colour = step * 68.0, PARTS[step % 4]
        for row in range(3):
            picture.steps(row, start, 56)
        picture.bar(range(3), start + 55, 8, colour)
        picture.message(3, start + 40, 39, "ABCD"[step % 4], colour)
    return picture


def grouping_sgd() -> Timeline:
    picture = Timeline(
        ["fast  worker 0", "worker 2", "centre", "slow  worker 1", "worker 3"],
        "Workers of one speed do exact SGD together; every few steps the centre gets what a group changed.",
        gaps=[2, 3],
    )
    for rows, length, asks in (([0, 1], 40, 1), ([3, 4], 84, 3)):
        at = 0.0
        for step in range(1, int(620 / length) + 1):
            for row in rows:
                picture.steps(row, at, length - 8)
            at += length
            picture.bar(rows, at - 10, 6, PARTS[2])
            if step % 4 == 0:
                picture.arrow((at - 6, asks), (at + 6, 2))
                picture.arrow((at + 18, 2), (at + 30, asks))
    picture.message(2, 0, 620, "in parts, owned by the workers")
    return picture


def lasgd() -> Timeline:
    picture = Timeline(
        ["fast worker", "wire", "slow worker"],
        "One all-reduce of models after another; nobody waits, steps made meanwhile stay.",
        gaps=[1, 2],
    )
    picture.steps(0, 0, 34, 18)
    picture.steps(2, 0, 68, 9)
    for start in (68.0, 204.0, 340.0, 476.0):
        for row in (0, 2):
            picture.arrow((start - 2, row), (start + 10, 1), PARTS[0])
            picture.arrow((start + 112, 1), (start + 126, row), PARTS[2])
        picture.message(1, start, 130, "mean of models")
    return picture


def leader_sgd() -> Timeline:
    picture = Timeline(
        ["worker 0", "worker 1", "worker 2", "worker 3"],
        "At a meeting the worker with the lowest loss sends its model; the others move towards it.",
    )
    at = 0.0
    for leader in (1, 2, 0):
        end = at + 4 * 40
        for row in range(4):
            picture.steps(row, at, 40, 4)
        picture.label(leader, end + 2, "leads", OURS)
        for row in range(4):
            if row != leader:
                picture.arrow((end + 20, leader), (end + 20 + 6 * abs(row - leader), row))
        at = end + 50
    return picture


PICTURES: dict[str, Callable[[], Timeline]] = {
    "sasgd.svg": sasgd,
    "diloco.svg": diloco,
    "trickle.svg": trickle,
    "hierarchical_averaging.svg": hierarchical_averaging,
    "centre.svg": centre,
    "post_local.svg": post_local,
    "partial_averaging.svg": partial_averaging,
    "grouping_sgd.svg": grouping_sgd,
    "lasgd.svg": lasgd,
    "leader_sgd.svg": leader_sgd,
}


def main() -> None:
    for name, make in PICTURES.items():
        (DOCS / name).write_text(make().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
