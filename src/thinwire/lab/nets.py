"""Networks as sizes and seconds: what an emulated accelerator has to know; no torch.

Per-layer shapes and multiply-adds are computed from each architecture's definition. Seconds come from
published throughput; tags as in the design notes ([read], [recall], [derived]; recall is not verified):

| name     | one worker's throughput   | batch | where from                                            |
|----------|---------------------------|-------|-------------------------------------------------------|
| resnet50 | 52.873 samples/s [read]   | 256   | gTop-k authors' plotting script, P=1 (they accumulate |
|          |                           |       | 16 micro-steps of 16; here it is one step)            |
| vgg16    | 1317.333 samples/s [read] | 128   | same (their P=32 breakdown: 0.1395 s, not 0.0972)     |
| alexnet  | 173.469 samples/s [read]  | 64    | same (their P=32 breakdown: 0.2572 s, not 0.3689)     |
| resnet20 | 920.632 samples/s [read]  | 128   | same                                                  |
| lstm-ptb | 392.0 [read] sequences/s  | 100   | same; unit and batch are [derived]: with 20 their     |
|          |                           |       | dense all-reduce would beat its own ring limit        |
| vgg-a    | 2510/90 images/s [recall] | 4     | Das 2016: 2510 images/s on 128 nodes, 90x one node;   |
|          |                           |       | 512 images on 128 nodes                               |
| dnn7     | 4600 frames/s [recall]    | 64    | Das 2016, one node; 1024 frames on 16 nodes [recall]  |

Backward takes twice as long as forward: data gradient and weight gradient cost one forward each ([read],
the 3 * 2 in the computation formula of Das 2016). Inside each, a layer's share is its multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinwire.errors import SettingError, check, check_one_of

Shape = tuple[int, ...]
NET_VARIABLE = "THINWIRE_LAB_EMULATE"
"""Environment variable with the net that `thinwire lab run --emulate` was given."""
SCALE_VARIABLE = "THINWIRE_LAB_SCALE"


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that receive their gradients together, and the work behind them."""

    name: str
    shapes: tuple[Shape, ...]
    multiply_adds: float

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Net:
    """Layers from input to output, and how long one accelerator takes for them."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    """Samples per step and worker that the seconds stand for."""
    forward_s: float
    backward_s: float
    scale: float = 1.0
    """Part of the parameters of the net that it stands for."""

    @property
    def num_params(self) -> int:
        return sum(layer.num_params for layer in self.layers)

    def shares(self) -> tuple[float, ...]:
        """Each layer's part of the compute time, by multiply-adds; they add up to one."""
        total = sum(layer.multiply_adds for layer in self.layers)
        return tuple(layer.multiply_adds / total for layer in self.layers)

    def scaled(self, factor: float) -> Net:
        """The same net with `factor` times the parameters and the same seconds."""
        layers = (replace(x, shapes=tuple(_shrink(s, factor) for s in x.shapes)) for x in self.layers)
        return replace(self, layers=tuple(layers), scale=self.scale * factor)


def _shrink(shape: Shape, factor: float) -> Shape:
    # Both sides of a matrix shrink alike, so that low-rank methods still see something like a matrix.
    if len(shape) == 1:
        return (max(1, round(shape[0] * factor)),)
    inner = max(1, round(shape[1] * math.sqrt(factor)))
    kernel = shape[2:]
    outer = math.prod(shape) * factor / (inner * math.prod(kernel))
    return (max(1, round(outer)), inner, *kernel)


def _conv(name: str, into: int, out: int, kernel: int, side: int, *, norm: bool = True) -> Layer:
    """A convolution with `side` x `side` outputs; with its batch norm, or else with a bias."""
    weight: Shape = (out, into, kernel, kernel)
    rest: tuple[Shape, ...] = ((out,), (out,)) if norm else ((out,),)
    return Layer(name, (weight, *rest), float(math.prod(weight) * side * side))


def _linear(name: str, into: int, out: int) -> Layer:
    return Layer(name, ((out, into), (out,)), float(into * out))


def _resnet50() -> list[Layer]:
    layers = [_conv("conv1", 3, 64, 7, 112)]
    into = 64
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
    return [*layers, _linear("fc", 2048, 1000)]


def _resnet20() -> list[Layer]:
    layers = [_conv("conv1", 3, 16, 3, 32)]
    into = 16
    for stage, (width, side) in enumerate([(16, 32), (32, 16), (64, 8)], 1):
        for block in range(3):
            layers += [
                _conv(f"layer{stage}.{block}.conv1", into, width, 3, side),
                _conv(f"layer{stage}.{block}.conv2", width, width, 3, side),
            ]
            into = width
    return [*layers, _linear("fc", 64, 10)]


def _vgg(plan: str, side: int, *, norm: bool) -> list[Layer]:
    """Convolutions of a VGG: `plan` lists the widths, M halves the side."""
    layers: list[Layer] = []
    into = 3
    for word in plan.split():
        if word == "M":
            side //= 2
            continue
        layers.append(_conv(f"conv{len(layers) + 1}", into, int(word), 3, side, norm=norm))
        into = int(word)
    return layers


def _vgg16_cifar() -> list[Layer]:
    plan = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"
    return [*_vgg(plan, 32, norm=True), _linear("fc", 512, 10)]


def _vgg_a() -> list[Layer]:
    convolutions = _vgg("64 M 128 M 256 256 M 512 512 M 512 512 M", 224, norm=False)
    return [
        *convolutions,
        _linear("fc1", 25088, 4096),
        _linear("fc2", 4096, 4096),
        _linear("fc3", 4096, 1000),
    ]


def _alexnet() -> list[Layer]:
    return [
        _conv("conv1", 3, 64, 11, 55, norm=False),
        _conv("conv2", 64, 192, 5, 27, norm=False),
        _conv("conv3", 192, 384, 3, 13, norm=False),
        _conv("conv4", 384, 256, 3, 13, norm=False),
        _conv("conv5", 256, 256, 3, 13, norm=False),
        _linear("fc1", 9216, 4096),
        _linear("fc2", 4096, 4096),
        _linear("fc3", 4096, 1000),
    ]


def _lstm_ptb() -> list[Layer]:
    words, hidden = 10_000, 1500
    gates: tuple[Shape, ...] = ((4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    return [
        Layer("embedding", ((words, hidden),), 0.0),
        *(Layer(f"lstm{i}", gates, 8.0 * hidden * hidden) for i in (1, 2)),
        _linear("decoder", hidden, words),
    ]


def _dnn7() -> list[Layer]:
    sides = [429, *[2048] * 7, 9304]  # the speech net of Seide 2011 [recall]
    return [_linear(f"fc{i + 1}", sides[i], sides[i + 1]) for i in range(8)]


_KNOWN: dict[str, tuple[Callable[[], list[Layer]], float, int]] = {
    "alexnet": (_alexnet, 173.469, 64),
    "dnn7": (_dnn7, 4600.0, 64),
    "lstm-ptb": (_lstm_ptb, 392.0, 100),
    "resnet20": (_resnet20, 920.632, 128),
    "resnet50": (_resnet50, 52.873, 256),
    "vgg-a": (_vgg_a, 2510 / 90, 4),
    "vgg16": (_vgg16_cifar, 1317.333, 128),
}
NET_NAMES = tuple(_KNOWN)
_HINT = f"a name ({', '.join(NET_NAMES)}), or params=5e6,layers=16,forward=0.1,backward=0.2"


def known_net(name: str, *, batch: int | None = None) -> Net:
    """A published network; another `batch` takes proportionally longer or shorter."""
    check_one_of("emulate", name, NET_NAMES)
    build, samples_per_s, usual = _KNOWN[name]
    batch = usual if batch is None else batch
    check(batch >= 1, "emulate batch", "at least 1", batch)
    third_s = batch / samples_per_s / 3
    return Net(name=name, layers=tuple(build()), batch=batch, forward_s=third_s, backward_s=2 * third_s)


def equal_net(*, params: int, layers: int, forward_s: float, backward_s: float) -> Net:
    """`layers` layers of equal size and equal work; the sizes add up to `params` exactly."""
    check(layers >= 1, "emulate layers", "at least 1", layers)
    check(params >= layers, "emulate params", "at least one per layer", params)
    check(0 <= forward_s < math.inf, "emulate forward", "seconds, 0 or more", forward_s)
    check(0 <= backward_s < math.inf, "emulate backward", "seconds, 0 or more", backward_s)
    each, rest = divmod(params, layers)
    sizes = [each + 1] * rest + [each] * (layers - rest)
    made = tuple(Layer(f"layer{i}", (_near_square(size),), 1.0) for i, size in enumerate(sizes))
    return Net(
        name=f"{layers} equal layers", layers=made, batch=1, forward_s=forward_s, backward_s=backward_s
    )


def _near_square(size: int) -> Shape:
    """A matrix of exactly `size` numbers if it has a fairly square one, else a vector."""
    root = math.isqrt(size)
    for rows in range(root, root // 4, -1):
        if size % rows == 0:
            return (rows, size // rows)
    return (size,)


def parse_net(spec: str, *, scale: float = 1.0) -> Net:
    """Read `resnet50`, `resnet50,batch=64`, or `params=5e6,layers=16,forward=0.1,backward=0.2`.

    >>> parse_net("params=5e6,layers=16,forward=0.1,backward=0.2").num_params
    5000000
    """
    check(0 < scale <= 1, "scale", "above 0 and at most 1", scale)
    words = [word.strip() for word in spec.split(",") if word.strip()]
    check(bool(words), "emulate", "a net", spec, hint=_HINT)
    if "=" in words[0]:
        numbers = _numbers(words, allowed=("params", "layers", "forward", "backward"))
        for name in ("params", "forward", "backward"):
            check(name in numbers, "emulate", f"given {name}=", spec, hint=_HINT)
        net = equal_net(
            params=_whole("params", numbers["params"]),
            layers=_whole("layers", numbers.get("layers", 1.0)),
            forward_s=numbers["forward"],
            backward_s=numbers["backward"],
        )
    else:
        numbers = _numbers(words[1:], allowed=("batch",))
        batch = _whole("batch", numbers["batch"]) if "batch" in numbers else None
        net = known_net(words[0], batch=batch)
    return net if scale == 1 else net.scaled(scale)


def _numbers(words: list[str], *, allowed: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        check_one_of("emulate field", name, allowed)
        check(name not in found, f"emulate {name}", "given once", word)
        try:
            found[name] = float(text)
        except ValueError:
            raise SettingError(f"emulate {name} must be a number, got {text!r}", hint=_HINT) from None
    return found


def _whole(name: str, number: float) -> int:
    check(math.isfinite(number) and number == int(number), f"emulate {name}", "a whole number", number)
    return int(number)
