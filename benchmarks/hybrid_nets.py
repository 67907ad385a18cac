"""VGG-A and a 7-layer DNN for the lab: emulated compute, the dense layers and collectives of real training.

Every side of a layer and the batch are cut by 8, so weights and activations both shrink by 64, and so does
the rate: what is sent takes as long as it would at full size. Convolutions are emulated layers with real
gradients. Dense layers are real `nn.Linear`s, so that `hybridize` splits them as it does in training; a pause
beside each stands for the time they would compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.lab.emulate import EmulatedDevice, EmulatedLayer
from thinwire.lab.nets import Layer, Net, known_net

SHRINK = 8
BYTES_SCALE = SHRINK * SHRINK
TIME_SCALE = 4
"""Everything runs this many times faster, computing and sending alike, so that a run takes minutes."""


@dataclass(frozen=True, slots=True)
class HybridNet:
    """A net of the lab, with the minibatch of all workers."""

    name: str
    minibatch: int
    seconds_per_sample: float
    paper: dict[int, float]
    """Published speed-ups by number of nodes."""

    def at(self, workers: int) -> Net:
        """Layers as published, and the seconds of one worker's share of the minibatch."""
        net = known_net(self.name)
        total_s = self.minibatch / workers * self.seconds_per_sample / TIME_SCALE
        return Net(
            name=net.name,
            layers=net.layers,
            batch=max(1, self.minibatch // workers),
            forward_s=total_s / 3,
            backward_s=2 * total_s / 3,
        )


NETS = {
    "vgg-a": HybridNet("vgg-a", 512, 90 / 2510, {64: 53.0, 128: 90.0}),
    "dnn7": HybridNet("dnn7", 256, 1 / 4600, {16: 6.5}),
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


def build(net: Net, *, seed: int) -> nn.Sequential:
    """The net at an eighth of every side; its input has shape (rows, 1)."""
    device = EmulatedDevice()
    layers, shares = [_shrunk(layer) for layer in net.layers], net.shares()
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


def _shrunk(layer: Layer) -> Layer:
    if not layer.name.startswith("fc"):  # a convolution's gradient is sent as it is, whatever its shape
        return Layer(layer.name, ((max(1, layer.num_params // BYTES_SCALE),),), layer.multiply_adds)
    (out, into), *_ = layer.shapes
    weight = (max(1, out // SHRINK), max(1, into // SHRINK))
    return Layer(layer.name, (weight, weight[:1]), layer.multiply_adds)


def rows(net: Net) -> int:
    """Rows of one worker's batch."""
    return max(1, net.batch // SHRINK)
