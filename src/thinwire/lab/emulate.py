"""An emulated accelerator: layers that wait as long as a GPU would compute, with real gradients.

The waiting is emulated, the bytes are not: every parameter has its real shape and every backward hands
out a real gradient of that shape, last layer first, which then crosses the network for real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.lab.nets import NET_VARIABLE, SCALE_VARIABLE, Net, parse_net
from thinwire.lab.pace import Pace

SHORTEST_SLEEP_S = 0.0002
"""Shorter waits are owed to the next layer: the kernel cannot sleep them precisely."""
MOST_OVERSLEPT_S = 0.05
"""More than this is not won back: a worker that was stopped did not compute meanwhile."""
HIDDEN_GAP_S = 0.0003
"""Host time between two layers that would hide behind a GPU's queue."""


class Stopwatch:
    """Makes stretches of work take a stated time in sum, whatever each sleep overshoots.

    Of the time between two stretches only the first `HIDDEN_GAP_S` are won back: a GPU computes on while
    the host dispatches the next layer, but idles while a hook waits for the wire.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._last_s = clock()
        self.owed_s = 0.0

    def stretch(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        """Do `work` and wait for the rest of `seconds`, less what earlier stretches took too long."""
        start_s = self._clock()
        self.owed_s += seconds - min(start_s - self._last_s, HIDDEN_GAP_S)
        result = work() if work is not None else None
        left_s = self.owed_s - (self._clock() - start_s)
        if left_s >= SHORTEST_SLEEP_S:
            self._sleep(left_s)
        self._last_s = self._clock()
        self.owed_s = max(self.owed_s - (self._last_s - start_s), -MOST_OVERSLEPT_S)
        return result


class _Layer(torch.autograd.Function):
    """Passes its input on; the backward hands every parameter `noise * sum(gradient of the output)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *params: Tensor) -> Tensor:
        ctx.layer = layer
        layer.wait(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        layer: EmulatedLayer = ctx.layer
        (output,) = outputs
        gradients = layer.wait(layer.backward_s, lambda: layer.gradients(output.sum()))
        return (output, None, *gradients)


class EmulatedLayer(nn.Module):
    """One layer: real parameters, emulated seconds."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], noise: Tensor, clock: _Clock) -> None:
        super().__init__()
        # Names as torch gives them: optimizers with rules for "bias" find something to act on.
        for i, shape in enumerate(shapes):
            name = "weight" if i == 0 else "bias" if i == 1 else f"extra{i}"
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._noise = noise  # not a buffer: DDP would broadcast it before every forward
        self.forward_s = 0.0
        self.backward_s = 0.0
        self._clock = clock

    def wait(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        return self._clock.stretch(seconds, work)

    def gradients(self, scale: Tensor) -> list[Tensor]:
        """Fresh tensors, so that autograd keeps them as `.grad` without another copy."""
        params = list(self.parameters())
        return [(self._noise[: p.numel()] * scale).view_as(p).to(p.dtype) for p in params]

    def forward(self, x: Tensor) -> Tensor:
        return _Layer.apply(x, self, *self.parameters())  # type: ignore[no-any-return,no-untyped-call]


class _Clock:
    """A stopwatch that runs slower on a slow host."""

    def __init__(self, speed: Callable[[], float], watch: Stopwatch) -> None:
        self._speed = speed
        self._watch = watch
        self.stopped = False

    def stretch(self, seconds: float, work: Callable[[], Any] | None = None) -> Any:
        if self.stopped:
            return work() if work is not None else None
        return self._watch.stretch(seconds / self._speed(), work)


class Emulated(nn.Module):
    """A net whose forward and backward take the seconds `net` states; the processor does nearly nothing.

    Its input is anything with a batch dimension, its output has shape (batch, 1). The gradient of every
    parameter is fixed noise times the sum of the output's gradient, so that scaling the loss scales the
    gradients, as in a real net. Workers with another `seed` have other gradients.

    >>> model = Emulated.parse("params=1000,layers=4,forward=0,backward=0")
    >>> model(torch.ones(2, 1)).mean().backward()
    >>> sum(p.grad.numel() for p in model.parameters())
    1000
    """

    def __init__(
        self,
        net: Net,
        *,
        seed: int = 0,
        speed: Callable[[], float] | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        if speed is None:
            pace = Pace.of_this_worker()
            speed = (lambda: pace.speed) if pace is not None else (lambda: 1.0)
        self._clock = clock = _Clock(speed, watch or Stopwatch())
        largest = max(max(torch.Size(s).numel() for s in layer.shapes) for layer in net.layers)
        # One buffer serves all layers: 32 workers on one machine cannot afford a copy each.
        noise = torch.randn(largest, generator=torch.Generator().manual_seed(seed))
        self.layers = nn.Sequential()
        for layer, share in zip(net.layers, net.shares(), strict=True):
            module = EmulatedLayer(layer.shapes, noise, clock)
            module.forward_s = net.forward_s * share
            module.backward_s = net.backward_s * share
            self.layers.add_module(layer.name.replace(".", "_"), module)

    @staticmethod
    def parse(spec: str, *, scale: float = 1.0, seed: int = 0) -> Emulated:
        """Build from a spec string; see `thinwire.lab.nets.parse_net`."""
        return Emulated(parse_net(spec, scale=scale), seed=seed)

    @staticmethod
    def of_this_lab() -> Emulated:
        """The net given as `thinwire lab run --emulate`, with other gradients on every worker."""
        spec = os.environ.get(NET_VARIABLE)
        if spec is None:
            raise UsageError("no net to emulate was given", hint="thinwire lab run --emulate resnet50 ...")
        scale = float(os.environ.get(SCALE_VARIABLE, "1"))
        return Emulated.parse(spec, scale=scale, seed=int(os.environ.get("RANK", "0")))

    @contextmanager
    def instant(self) -> Iterator[None]:
        """In here layers take no time: for steps that only warm something up."""
        self._clock.stopped = True
        try:
            yield
        finally:
            self._clock.stopped = False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x.reshape(len(x), -1)[:, :1].float())
        return h
