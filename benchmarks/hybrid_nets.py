"""VGG-A and a 7-layer DNN for the lab: emulated compute, the dense layers and collectives of real training.

Every side of a layer and the batch are cut by `Scale.shrink`, so weights and activations both shrink by its
square, and so does the rate: what is sent takes as long as it would at full size. Convolutions are emulated
layers with real gradients. Dense layers are real `nn.Linear`s, so that `hybridize` splits them as it does in
training; a pause beside each stands for the time they would compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.engine import attach
from thinwire.lab.emulate import EmulatedDevice, EmulatedLayer
from thinwire.lab.nets import Layer, Net, known_net
from thinwire.wire import process_group

RATE_BITS_PER_S = 1e9
DDP_BUCKET_MB = 25
"""PyTorch's default."""


class Scale(NamedTuple):
    """How a training is made to fit into the lab."""

    shrink: int
    """Every side of a layer, and the batch, are cut by this."""
    speed: float
    """Everything runs this many times faster, computing and sending alike."""

    @property
    def bytes(self) -> int:
        """Bytes are cut by this."""
        return self.shrink**2

    @property
    def bits_per_s(self) -> float:
        """The lab's rate that stands for RATE_BITS_PER_S."""
        return RATE_BITS_PER_S * self.speed / self.bytes


def scale_messages(scale: Scale) -> float:
    """Cut the engine's limits of message sizes as bytes are cut, and return DDP's size of buckets in MB.

    They are in bytes: a bucket of 25 MB would hold all convolutions of the small net, and nothing of them
    could be sent before the end of backward, as most of them is at full size.
    """
    for module, name in (
        (attach, "MOST_BUCKET_BYTES"),
        (attach, "LEAST_BUCKET_BYTES"),
        (attach, "LEAST_MESSAGE_BYTES"),
        (process_group, "RING_BYTES"),
    ):
        setattr(module, name, max(1, getattr(module, name) // scale.bytes))
    return DDP_BUCKET_MB / scale.bytes


class Published(NamedTuple):
    """A speed-up over one node, with the minibatch of all nodes."""

    speed_up: float
    minibatch: int


@dataclass(frozen=True, slots=True)
class HybridNet:
    """A net of the lab, with the minibatch of all workers."""

    name: str
    minibatch: int
    seconds_per_sample: float
    worker_speed: float
    """What `Scale.speed` times the number of workers is: workers share the processor, which must not be the
    limit."""
    paper: dict[int, Published]
    """By number of nodes."""

    def scale(self, workers: int, speed: float | None = None) -> Scale:
        return Scale(8, speed or self.worker_speed / workers)

    def at(self, workers: int, speed: float = 1.0, minibatch: int | None = None) -> Net:
        """Layers as published, and the seconds of one worker's share of the minibatch."""
        net, minibatch = known_net(self.name), minibatch or self.minibatch
        total_s = minibatch / workers * self.seconds_per_sample / speed
        return Net(
            name=net.name,
            layers=net.layers,
            batch=max(1, minibatch // workers),
            forward_s=total_s / 3,
            backward_s=2 * total_s / 3,
        )


NETS = {
    "vgg-a": HybridNet("vgg-a", 512, 90 / 2510, 8.0, {64: Published(53.0, 256), 128: Published(90.0, 512)}),
    "dnn7": HybridNet("dnn7", 256, 1 / 4600, 4.0, {16: Published(6.5, 256)}),
}
"""Seconds of one node: Das et al., as `lab/nets.py` says where they are from."""


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Pause) -> Any:
        ctx.layer = layer
        return layer.device.compute(layer.forward_s, x.clone)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        layer, (gradient,) = ctx.layer, outputs
        return layer.device.compute(layer.backward_s, lambda: gradient), None


class Pause(nn.Module):
    """Takes the time that a dense layer would compute."""

    def __init__(self, device: EmulatedDevice, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Pause.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]


class Widen(nn.Module):
    """From an emulated convolution's one number per row to the features of the first dense layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, self.features).contiguous()


def build(net: Net, shrink: int, *, seed: int) -> nn.Sequential:
    """The net with every side cut; its input has shape (rows, 1)."""
    device = EmulatedDevice()
    layers, shares = [_shrunk(layer, shrink) for layer in net.layers], net.shares()
    largest = max(layer.num_params for layer in layers)
    noise = torch.randn(largest, generator=torch.Generator().manual_seed(seed))
    model, widened = nn.Sequential(), False
    for layer, share in zip(layers, shares, strict=True):
        seconds = net.forward_s * share, net.backward_s * share
        if not layer.name.startswith("fc"):
            model.add_module(layer.name, EmulatedLayer(layer, noise, device, *seconds))
            continue
        out, into = layer.shapes[0]
        if not widened:
            model.add_module("widen", Widen(into))
            widened = True
        model.add_module(layer.name, nn.Linear(into, out))
        model.add_module(f"{layer.name}_pause", Pause(device, *seconds))
    return model


def _shrunk(layer: Layer, shrink: int) -> Layer:
    if not layer.name.startswith("fc"):  # a convolution's gradient is sent as it is, whatever its shape
        return Layer(layer.name, ((max(1, layer.num_params // shrink**2),),), layer.multiply_adds)
    (out, into), *_ = layer.shapes
    weight = (max(1, out // shrink), max(1, into // shrink))
    return Layer(layer.name, (weight, weight[:1]), layer.multiply_adds)


def rows(net: Net, shrink: int) -> int:
    """Rows of one worker's batch."""
    return max(1, net.batch // shrink)
