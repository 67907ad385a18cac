"""Sizes and seconds of the known nets, and what a bad spec is told."""

from __future__ import annotations

import math

import pytest

from thinwire.errors import SettingError
from thinwire.lab.nets import NET_NAMES, known_net, parse_net


@pytest.mark.parametrize(
    ("name", "num_params", "step_s"),
    [
        ("resnet50", 25_557_032, 256 / 52.873),
        ("vgg16", 14_724_042, 128 / 1317.333),
        ("alexnet", 61_100_840, 64 / 173.469),
        ("resnet20", 269_722, 128 / 920.632),
        ("lstm-ptb", 66_034_000, 100 / 392.0),
        ("vgg-a", 132_863_336, 4 * 90 / 2510),
        ("dnn7", 45_122_648, 64 / 4600),
        ("overfeat", 145_920_872, 4 / 90),
    ],
)
def test_totals_match_the_architecture(name: str, num_params: int, step_s: float) -> None:
    net = known_net(name)
    assert net.num_params == num_params
    assert net.forward_s + net.backward_s == pytest.approx(step_s)
    assert sum(net.shares()) == pytest.approx(1.0)


def test_multiply_adds_match_what_is_published_for_the_image_nets() -> None:
    giga = {name: sum(layer.multiply_adds for layer in known_net(name).layers) / 1e9 for name in NET_NAMES}
    assert giga["resnet50"] == pytest.approx(4.09, abs=0.01)
    assert giga["alexnet"] == pytest.approx(0.71, abs=0.01)
    assert giga["vgg-a"] == pytest.approx(7.61, abs=0.01)
    assert giga["resnet20"] == pytest.approx(0.041, abs=0.001)


@pytest.mark.parametrize("name", NET_NAMES)
@pytest.mark.parametrize("scale", [0.5, 0.1, 0.01])
def test_scale_shrinks_sizes_and_keeps_seconds(name: str, scale: float) -> None:
    whole, part = known_net(name), parse_net(name, scale=scale)
    assert part.num_params == pytest.approx(whole.num_params * scale, rel=0.06)
    assert (part.forward_s, part.backward_s) == (whole.forward_s, whole.backward_s)
    assert [len(layer.shapes) for layer in part.layers] == [len(layer.shapes) for layer in whole.layers]


def test_batch_scales_the_seconds() -> None:
    assert parse_net("resnet50,batch=64").forward_s == pytest.approx(known_net("resnet50").forward_s / 4)


@pytest.mark.parametrize("num_params", [16, 17, 1_000_003, 5_000_000])
def test_equal_layers_add_up_exactly(num_params: int) -> None:
    net = parse_net(f"params={num_params},layers=16,forward=0.1,backward=0.2")
    sizes = [layer.num_params for layer in net.layers]
    assert sum(sizes) == num_params
    assert max(sizes) - min(sizes) <= 1
    assert all(math.prod(layer.shapes[0]) == layer.num_params for layer in net.layers)


@pytest.mark.parametrize(
    ("spec", "scale", "words"),
    [
        ("", 1.0, ["emulate", "a net"]),
        ("resnet51", 1.0, ["emulate", "resnet50", "resnet51"]),
        ("resnet50,batch=0", 1.0, ["batch", "at least 1", "0"]),
        ("resnet50,depth=3", 1.0, ["emulate field", "batch", "depth"]),
        ("params=5e6", 1.0, ["forward=", "hint"]),
        ("params=many,forward=1,backward=1", 1.0, ["params", "a number", "many"]),
        ("params=1.5,forward=1,backward=1", 1.0, ["params", "whole", "1.5"]),
        ("params=inf,forward=1,backward=1", 1.0, ["params", "whole", "inf"]),
        ("params=8,layers=16,forward=1,backward=1", 1.0, ["params", "one per layer", "8"]),
        ("params=8,layers=0,forward=1,backward=1", 1.0, ["layers", "1 to", "0"]),
        ("params=8,forward=-1,backward=1", 1.0, ["forward", "0 to", "-1"]),
        ("params=8,forward=1,backward=nan", 1.0, ["backward", "0 to", "nan"]),
        ("params=8,params=9,forward=1,backward=1", 1.0, ["params", "once"]),
        ("resnet50", 0.0, ["scale", "above 0", "0.0"]),
        ("resnet50", 2.0, ["scale", "at most 1", "2.0"]),
    ],
)
def test_bad_specs_name_field_rule_and_value(spec: str, scale: float, words: list[str]) -> None:
    with pytest.raises(SettingError) as raised:
        parse_net(spec, scale=scale)
    for word in words:
        assert word in str(raised.value)
