"""Layer sizes and compute times of neural networks, for the emulated accelerator; no torch.

Per-layer shapes and multiply-adds are computed from each architecture's definition. Seconds come from
published throughput; tags as in the design notes ([read], [recall], [derived]; recall is not verified).

Backward takes twice as long as forward: data gradient and weight gradient cost one forward each ([read],
the 3 * 2 in the computation formula of Das 2016). Inside each, a layer's share is its multiply-adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thinwire.errors import SettingError, check, check_one_of

Shape = tuple[int, ...]
NET_VARIABLE = "THINWIRE_LAB_EMULATE"
"""Environment variable with the argument of `thinwire lab run --emulate`."""
SCALE_VARIABLE = "THINWIRE_LAB_SCALE"
MOST_PARAMS = 10**12
MOST_LAYERS = 10_000
LONGEST_S = 24 * 3600.0
"""Longest time of one forward or backward."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that receive their gradients together, and the multiply-adds of one sample."""

    name: str
    shapes: tuple[Shape, ...]
    multiply_adds: float

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Net:
    """Layers from input to output, and the seconds one accelerator takes for them."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    """Samples per step and worker."""
    forward_s: float
    backward_s: float

    @property
    def num_params(self) -> int:
        return sum(layer.num_params for layer in self.layers)

    def shares(self) -> tuple[float, ...]:
        """Return each layer's share of the compute time, by multiply-adds; the shares sum to one."""
        total = sum(layer.multiply_adds for layer in self.layers)
        return tuple(layer.multiply_adds / total for layer in self.layers)


def _shrink(shape: Shape, factor: float) -> Shape:
    # Both sides of a matrix shrink alike: low-rank methods would gain nothing on a very narrow one.
    if len(shape) == 1:
        return (max(1, round(shape[0] * factor)),)
    inner = max(1, round(shape[1] * math.sqrt(factor)))
    kernel = shape[2:]
    outer = math.prod(shape) * factor / (inner * math.prod(kernel))
    return (max(1, round(outer)), inner, *kernel)


def _conv(name: str, into: int, out: int, kernel: int, side: int, *, norm: bool = True) -> Layer:
    """Return a convolution with `side` x `side` outputs, and with a batch norm or else a bias."""
    weight: Shape = (out, into, kernel, kernel)
    rest: tuple[Shape, ...] = ((out,), (out,)) if norm else ((out,),)
    return Layer(name, (weight, *rest), float(math.prod(weight) * side * side))


def _chain(convs: Sequence[tuple[int, int, int]], *widths: int, norm: bool = True) -> list[Layer]:
    """Return convolutions (width, kernel, side) of an image, one after another, then linear layers."""
    ins = [3, *(out for out, _, _ in convs)]
    pairs = itertools.pairwise(widths)
    return [
        *(_conv(f"conv{i + 1}", ins[i], *conv, norm=norm) for i, conv in enumerate(convs)),
        *(Layer(f"fc{i}", ((out, n), (out,)), float(n * out)) for i, (n, out) in enumerate(pairs, 1)),
    ]


def _resnet50() -> list[Layer]:
    layers, into = [_conv("conv1", 3, 64, 7, 112)], 64
    for stage, (width, blocks, side) in enumerate([(64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            first_side = side * 2 if block == 0 and stage > 1 else side
            layers += [
                _conv(f"{name}.conv1", into, width, 1, first_side),
                _conv(f"{name}.conv2", width, width, 3, side),
                _conv(f"{name}.conv3", width, 4 * width, 1, side),
            ]
            if block == 0:
                layers.append(_conv(f"{name}.downsample", into, 4 * width, 1, side))
            into = 4 * width
    return [*layers, *_chain([], 2048, 1000)]


def _lstm_ptb() -> list[Layer]:
    words, hidden = 10_000, 1500
    gates: tuple[Shape, ...] = ((4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    return [
        Layer("embedding", ((words, hidden),), 0.0),
        *(Layer(f"lstm{i}", gates, 8.0 * hidden * hidden) for i in (1, 2)),
        *_chain([], hidden, words),
    ]


def _vgg(repeats: Sequence[int], side: int, *widths: int, norm: bool) -> list[Layer]:
    sizes = [(width, 3, side >> stage) for stage, width in enumerate((64, 128, 256, 512, 512))]
    convs = [size for size, count in zip(sizes, repeats, strict=True) for _ in range(count)]
    return _chain(convs, *widths, norm=norm)


_ALEXNET = [(64, 11, 55), (192, 5, 27), (384, 3, 13), (256, 3, 13), (256, 3, 13)]
_OVERFEAT = [(96, 11, 56), (256, 5, 24), (512, 3, 12), (1024, 3, 12), (1024, 3, 12)]
_RESNET20 = [(16, 3, 32)] * 7 + [(32, 3, 16)] * 6 + [(64, 3, 8)] * 6
_KNOWN: dict[str, tuple[Callable[[], list[Layer]], float, int]] = {
    # Samples/s of one worker [read] in the gTop-k authors' plotting script for P=1. Their P=32 breakdowns
    # differ: 0.2572 s, not 0.3689 (alexnet); 0.1395 s, not 0.0972 (vgg16).
    "alexnet": (lambda: _chain(_ALEXNET, 9216, 4096, 4096, 1000, norm=False), 173.469, 64),
    # Frames/s of one node and 1024 frames on 16 nodes: Das 2016 [recall]; the net is Seide 2011's [recall]
    "dnn7": (lambda: _chain([], 429, *[2048] * 7, 9304), 4600.0, 64),
    # Sequences/s: unit and batch are [derived], with 20 their dense all-reduce would beat its own ring limit
    "lstm-ptb": (_lstm_ptb, 392.0, 100),
    # The fast model of Sermanet 2013 [recall]; images/s of one node and 256 images on 64: Das 2016 [recall]
    "overfeat": (lambda: _chain(_OVERFEAT, 36864, 3072, 4096, 1000, norm=False), 90.0, 4),
    "resnet20": (lambda: _chain(_RESNET20, 64, 10), 920.632, 128),
    "resnet50": (_resnet50, 52.873, 256),  # they accumulate 16 micro-steps of 16; here it is one step
    # Das 2016 [recall]: 2510 images/s on 128 nodes, 90 times one node; 512 images on 128 nodes
    "vgg-a": (lambda: _vgg((1, 1, 2, 2, 2), 224, 25088, 4096, 4096, 1000, norm=False), 2510 / 90, 4),
    "vgg16": (lambda: _vgg((2, 2, 3, 3, 3), 32, 512, 10, norm=True), 1317.333, 128),
}
NET_NAMES = tuple(_KNOWN)
_HINT = f"a name ({', '.join(NET_NAMES)}), or params=5e6,layers=16,forward=0.1,backward=0.2"


def known_net(name: str, *, batch: int | None = None) -> Net:
    """Return a published network; the seconds are proportional to `batch`."""
    check_one_of("emulate", name, NET_NAMES)
    build, samples_per_s, usual = _KNOWN[name]
    batch = usual if batch is None else batch
    check(batch >= 1, "emulate batch", "at least 1", batch)
    most = int(LONGEST_S * samples_per_s)
    check(batch <= most, "emulate batch", f"at most {most:,}, a day of computing", batch)
    third_s = batch / samples_per_s / 3
    return Net(name=name, layers=tuple(build()), batch=batch, forward_s=third_s, backward_s=2 * third_s)


def equal_net(*, params: int, layers: int, forward_s: float, backward_s: float) -> Net:
    """Return a net of layers with equal size and work; the sizes sum to `params` exactly."""
    check(1 <= layers <= MOST_LAYERS, "emulate layers", f"1 to {MOST_LAYERS:,}", layers)
    check(params >= layers, "emulate params", "at least one per layer", params)
    check(params <= MOST_PARAMS, "emulate params", f"at most {MOST_PARAMS:g}", params)
    for name, seconds in (("forward", forward_s), ("backward", backward_s)):
        check(0 <= seconds <= LONGEST_S, f"emulate {name}", f"0 to {LONGEST_S:g} seconds", seconds)
    sizes = [(params + i) // layers for i in reversed(range(layers))]
    shapes = {size: _near_square(size) for size in set(sizes)}
    equal = tuple(Layer(f"layer{i}", (shapes[size],), 1.0) for i, size in enumerate(sizes))
    name = f"{layers} equal layers"
    return Net(name=name, layers=equal, batch=1, forward_s=forward_s, backward_s=backward_s)


def _near_square(size: int) -> Shape:
    """Return the shape of a nearly square matrix of exactly `size` numbers, else of a vector."""
    root = math.isqrt(size)
    rows = next((rows for rows in range(root, root // 4, -1) if size % rows == 0), None)
    return (rows, size // rows) if rows else (size,)


def parse_net(spec: str, *, scale: float = 1.0) -> Net:
    """Read `resnet50`, `resnet50,batch=64`, or `params=5e6,layers=16,forward=0.1,backward=0.2`.

    It has `scale` times the parameters, and the same seconds.

    >>> parse_net("params=5e6,layers=16,forward=0.1,backward=0.2").num_params
    5000000
    """
    check(0 < scale <= 1, "scale", "above 0 and at most 1", scale)
    words = [word.strip() for word in spec.split(",") if word.strip()]
    check(bool(words), "emulate", "a net", spec, hint=_HINT)
    if "=" in words[0]:
        values = {"layers": 1.0, **_parse_values(words, allowed=("params", "layers", "forward", "backward"))}
        for name in ("params", "forward", "backward"):
            check(name in values, "emulate", f"given {name}=", spec, hint=_HINT)
        sizes = {name: int(values[name]) for name in ("params", "layers")}
        net = equal_net(**sizes, forward_s=values["forward"], backward_s=values["backward"])
    else:
        values = _parse_values(words[1:], allowed=("batch",))
        net = known_net(words[0], batch=int(values["batch"]) if values else None)
    if scale == 1:
        return net
    layers = (replace(x, shapes=tuple(_shrink(s, scale) for s in x.shapes)) for x in net.layers)
    return replace(net, layers=tuple(layers))


def _parse_values(words: list[str], *, allowed: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        check_one_of("emulate field", name, allowed)
        check(name not in found, f"emulate {name}", "given once", word)
        try:
            value = float(text)
        except ValueError:
            raise SettingError(f"emulate {name} must be a number, got {text!r}", hint=_HINT) from None
        is_whole = name in ("forward", "backward") or value.is_integer()
        check(is_whole, f"emulate {name}", "a whole number", value)
        found[name] = value
    return found
