"""An emulated accelerator: layers that sleep as long as a GPU would compute, with real gradients.

Only the compute time is emulated: every parameter has its real shape, and every backward pass returns a real
gradient of that shape, last layer first, which then crosses the network.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.lab.control import HostStatus
from thinwire.lab.nets import NET_VARIABLE, SCALE_VARIABLE, Layer, Net, parse_net

MIN_SLEEP_S = 0.0002
"""Shorter sleeps are added to the next layer's: the kernel is not precise enough."""
MAX_OVERSLEEP_S = 0.05
"""Longest delay that later work makes up for: a worker that was stopped did not compute meanwhile."""
HIDDEN_GAP_S = 0.0003
"""Host time between two layers that a GPU's queue would hide."""


class EmulatedDevice:
    """Makes work take a stated total time, however inexact each sleep is.

    Between two pieces of work only the first `HIDDEN_GAP_S` count as compute time: a GPU computes while the
    host dispatches the next layer, but idles while a hook waits for the network.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep, self._last_s = clock, sleep, clock()
        self._host = HostStatus.from_environment()
        self.instant = False
        """Whether work takes no emulated time."""
        self.owed_s = 0.0
        """Time still to be slept; negative after sleeping too long."""

    def compute(self, seconds: float, work: Callable[[], Any] = lambda: None) -> Any:
        """Do `work` and sleep for the rest of `seconds`, which a slow host stretches; return its result."""
        if self.instant:
            return work()
        start_s = self._clock()
        seconds /= 1.0 if self._host is None else self._host.speed
        self.owed_s += seconds - min(start_s - self._last_s, HIDDEN_GAP_S)
        result = work()
        left_s = self.owed_s - (self._clock() - start_s)
        if left_s >= MIN_SLEEP_S:
            self._sleep(left_s)
        self._last_s = self._clock()
        self.owed_s = max(self.owed_s - (self._last_s - start_s), -MAX_OVERSLEEP_S)
        return result


class _EmulatedFunction(torch.autograd.Function):
    """Identity whose backward gives every parameter the gradient `noise * sum(gradient of the output)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *params: Tensor) -> Any:
        ctx.layer = layer
        return layer.device.compute(layer.forward_s, x.clone)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        layer, (output,) = ctx.layer, outputs
        gradients = layer.device.compute(layer.backward_s, lambda: layer.gradients(output.sum()))
        return (output, None, *gradients)


class EmulatedLayer(nn.Module):
    """One layer with real parameters and emulated compute time."""

    def __init__(
        self, layer: Layer, noise: Tensor, device: EmulatedDevice, forward_s: float, backward_s: float
    ) -> None:
        super().__init__()
        # Named as in torch's layers: some optimizers have rules for "bias".
        for i, shape in enumerate(layer.shapes):
            name = "weight" if i == 0 else "bias" if i == 1 else f"extra{i}"
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._noise = noise  # not a buffer: DDP would broadcast it before every forward
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s

    def gradients(self, scale: Tensor) -> list[Tensor]:
        """Return new tensors, so that autograd keeps them as `.grad` without another copy."""
        return [(self._noise[: p.numel()] * scale).view_as(p).to(p.dtype) for p in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return _EmulatedFunction.apply(x, self, *self.parameters())  # type: ignore[no-any-return,no-untyped-call]


class EmulatedModel(nn.Module):
    """A model whose forward and backward take the seconds of `net`, with nearly no processor time.

    Its input has a batch dimension and any other, its output has shape (batch, 1). The gradient of every
    parameter is fixed noise times the sum of the output's gradient: scaling the loss scales the gradients, as
    in a real model. Workers with different `seed`s have different gradients.

    >>> model = EmulatedModel(parse_net("params=1000,layers=4,forward=0,backward=0"))
    >>> model(torch.ones(2, 1)).mean().backward()
    >>> sum(p.grad.numel() for p in model.parameters())
    1000
    """

    def __init__(self, net: Net, *, seed: int = 0, device: EmulatedDevice | None = None) -> None:
        super().__init__()
        self.net = net
        self._device = device or EmulatedDevice()
        largest = max(math.prod(shape) for layer in net.layers for shape in layer.shapes)
        # All layers share one buffer: one machine has no memory for 32 workers with a copy per layer.
        noise = torch.randn(largest, generator=torch.Generator().manual_seed(seed))
        self.layers = nn.Sequential()
        for layer, share in zip(net.layers, net.shares(), strict=True):
            module = EmulatedLayer(layer, noise, self._device, net.forward_s * share, net.backward_s * share)
            self.layers.add_module(layer.name.replace(".", "_"), module)

    @staticmethod
    def from_environment() -> EmulatedModel:
        """Build the model given as `thinwire lab run --emulate`, with different gradients on every worker."""
        spec = os.environ.get(NET_VARIABLE)
        if spec is None:
            raise UsageError("no net to emulate was given", hint="thinwire lab run --emulate resnet50 ...")
        net = parse_net(spec, scale=float(os.environ.get(SCALE_VARIABLE, "1")))
        return EmulatedModel(net, seed=int(os.environ.get("RANK", "0")))

    @contextmanager
    def instant(self) -> Iterator[None]:
        """Let layers take no time inside the `with` block, for warm-up steps."""
        self._device.instant = True
        try:
            yield
        finally:
            self._device.instant = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.reshape(len(x), -1)[:, :1].float())  # type: ignore[no-any-return]
