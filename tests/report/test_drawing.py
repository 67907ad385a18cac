"""Labels that do not lie on each other, colours, and SVG that is fit for a page."""

from __future__ import annotations

import doctest
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import timings
from thinwire.report import drawing, tables
from thinwire.report.drawing import COLOURS, INK, looks_of, spread_out, wrapped
from thinwire.report.plots import MOST_POINTS, thinned
from thinwire.report.tables import Html, tag


@pytest.mark.parametrize("module", [drawing, tables, timings])
def test_examples_hold(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert failed == 0
    assert tried > 0


@given(st.lists(st.tuples(st.floats(-0.5, 1.5), st.floats(0.01, 0.1)), max_size=9))
def test_labels_keep_their_order_and_their_distance(wanted: list[tuple[float, float]]) -> None:
    wanted = sorted(wanted)
    places = spread_out([place for place, _ in wanted], [height for _, height in wanted])
    edges = [(p - h / 2, p + h / 2) for p, (_, h) in zip(places, wanted, strict=True)]
    assert all(lower[1] <= upper[0] + 1e-5 for lower, upper in pairwise(edges))
    assert all(low >= -1e-5 and high <= 1 + 1e-5 for low, high in edges)


def test_labels_with_room_stay_where_they_belong() -> None:
    assert spread_out([0.2, 0.8], [0.1, 0.1]) == [0.2, 0.8]


def test_short_labels_stay_on_a_line() -> None:
    assert wrapped("torchft-diloco") == "torchft-diloco"
    assert wrapped("averylongnamewithoutanybreak") == "averylongnamewithoutanybreak"
    assert wrapped("") == ""


def luminance(colour: str) -> float:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", [n for n in COLOURS if n not in ("paper", "grid", "compute")])
@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_paper(name: str, dark: bool) -> None:
    lighter, darker = sorted(
        (luminance(COLOURS[name][dark]), luminance(COLOURS["paper"][dark])), reverse=True
    )
    assert (lighter + 0.05) / (darker + 0.05) >= 3.5


def test_every_colour_is_one_variable() -> None:
    lights = [light for light, _ in COLOURS.values()]
    assert len(set(lights)) == len(lights)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for pair in COLOURS.values() for colour in pair)


def test_systems_keep_family_colours_however_many() -> None:
    many = looks_of([("silent", "ceiling"), *((f"o{i}", "ours") for i in range(10)), ("ddp", "rival")])
    assert many["silent"].colour == INK
    assert len({many[f"o{i}"].colour for i in range(8)}) == 8
    assert many["o8"].colour == many["o0"].colour
    assert many["ddp"].colour == COLOURS["rival-1"][0]


@given(st.integers(0, 2000))
def test_long_curves_are_averaged_down(length: int) -> None:
    curve = [(float(i), 2.0 * i) for i in range(length)]
    thin = thinned(curve)
    assert len(thin) == length if length <= MOST_POINTS else len(thin) <= MOST_POINTS
    assert all(y == pytest.approx(2 * x) for x, y in thin)


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "<i>", tag("b", "&"), title='"') == '<p title="&quot;">&lt;i&gt;<b>&amp;</b></p>'
    assert isinstance(tag("p"), Html)
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
