"""A computation on a GPU, recorded once and played again: one launch instead of thousands.

Models of a study are small, so that launching their kernels one by one takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

MOST_RECORDINGS = 8
"""Each holds on to the memory of its activations."""

Outputs = tuple[Tensor | None, ...]
Compute = Callable[[Sequence[Tensor]], Outputs]
"""May read and write, besides its inputs, only tensors that stay where they are."""


class Recording:
    """One computation with inputs of certain shapes."""

    def __init__(self, compute: Compute, inputs: Sequence[Tensor]) -> None:
        """Nothing is computed yet; RuntimeError if the computation has to ask the device for a number."""
        self._inputs = [torch.empty_like(tensor) for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = compute(self._inputs)

    def play(self, inputs: Sequence[Tensor]) -> Outputs:
        """The outputs, which the next call overwrites."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._outputs


class Recorder:
    """Plays computations of which it has a recording, and makes one when a computation comes again."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}
        self.refusal = ""
        """Why nothing is recorded, in torch's words."""

    def run(self, what: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Outputs:
        """What `compute` gives; `what` names it, so far as its inputs' shapes do not tell."""
        key = (what, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._record(key, compute, inputs)
        return compute(inputs) if recording is None else recording.play(inputs)

    def _record(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Recording | None:
        """None the first time: libraries choose their kernels then, which cannot be recorded."""
        if not inputs[0].is_cuda or self.refusal or len(self._recordings) == MOST_RECORDINGS:
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        try:
            self._recordings[key] = Recording(compute, inputs)
        except RuntimeError as error:
            self.refusal = str(error).split("\n", 1)[0]
        return self._recordings.get(key)
