"""A worker's strip of each bucket: the part whose optimizer state it keeps, and which it alone updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.buckets import ParameterBucket, local
from thinwire.errors import UsageError

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]
)
"""Optimizers of torch that treat each number by itself: a part of a parameter can be stepped alone."""


@dataclass(slots=True)
class StripPiece:
    """A part of one parameter, as a parameter of the user's optimizer."""

    place: int
    """The number of the parameter in its bucket."""
    start: int
    stop: int
    """In the flat parameter, of a DTensor in its local part."""
    parameter: nn.Parameter


class Strip:
    """The numbers of one bucket that this worker owns: the `rank`-th of `world_size` equal parts."""

    def __init__(self, bucket: ParameterBucket, rank: int, world_size: int) -> None:
        self.bucket = bucket
        self.world_size = world_size
        self.width = -(-bucket.num_parameters // world_size)
        self.start = min(rank * self.width, bucket.num_parameters)
        self.stop = min(self.start + self.width, bucket.num_parameters)
        self.values = bucket.gradient.new_zeros(self.width)
        """The parameters of this strip, which the optimizer updates; padded."""
        ends = list(accumulate(local(p).numel() for p in bucket.parameters))
        self.pieces: list[StripPiece] = []
        for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            low, high = max(begin, self.start), min(end, self.stop)
            if low < high:
                part = nn.Parameter(self.values[low - self.start : high - self.start])
                self.pieces.append(StripPiece(place, low - begin, high - begin, part))

    @torch.no_grad()
    def read_(self) -> None:
        """Take the strip from the parameters: a user may have changed them."""
        for piece in self.pieces:
            whole = local(self.bucket.parameters[piece.place]).reshape(-1)
            piece.parameter.copy_(whole[piece.start : piece.stop])

    def message(self) -> Tensor:
        """The gradients as a reduce-scatter takes them: to every worker its strip, and the bucket's tail."""
        gradients, tail = self.bucket.flat.gradients, self.bucket.flat.tail
        rows = gradients.new_zeros(self.world_size, self.width + tail.numel())
        whole, rest = divmod(gradients.numel(), self.width)
        rows[:whole, : self.width] = gradients[: whole * self.width].view(whole, self.width)
        if rest:
            rows[whole, :rest] = gradients[whole * self.width :]
        rows[:, self.width :] = tail
        return rows.view(-1)

    def take_(self, reduced: Tensor) -> None:
        """Put the mean of a strip and its tail back into the bucket."""
        gradients, tail = self.bucket.flat.gradients, self.bucket.flat.tail
        gradients[self.start : self.stop].copy_(reduced[: self.stop - self.start])
        tail.copy_(reduced[self.width :])

    @torch.no_grad()
    def give_gradients_(self) -> None:
        """Add the reduced gradients to those of the pieces."""
        flat = self.bucket.flat
        flat.divide_()
        used = flat.used_somewhere()
        at = self.start
        for piece in self.pieces:
            numel = piece.stop - piece.start
            if used[piece.place]:
                part = flat.gradients[at : at + numel]
                if piece.parameter.grad is None:
                    piece.parameter.grad = part.clone()
                else:
                    piece.parameter.grad.add_(part)
            at += numel


def check_elementwise(optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer for which a part of a parameter is not like the whole."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("torch.optim"):
            raise UsageError(
                f"sharded=True steps parts of parameters, which {kind.__name__} may not survive",
                hint=f"use one of torch's {', '.join(sorted(ELEMENTWISE))}, or sharded=False",
            )


class OwnedGroups:
    """Has the user's optimizers hold the pieces that this worker owns instead of the whole parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], strips: Sequence[Strip]) -> None:
        self._optimizers = optimizers
        self.pieces_of: dict[int, list[tuple[StripPiece, ParameterBucket]]] = {}
        """By id of each parameter; most have one piece here, or none."""
        for strip in strips:
            for parameter in strip.bucket.parameters:
                self.pieces_of[id(parameter)] = []
            for piece in strip.pieces:
                whole = strip.bucket.parameters[piece.place]
                self.pieces_of[id(whole)].append((piece, strip.bucket))
        self._whole: list[list[list[Tensor]]] = []
        """Each optimizer's groups of parameters, as its user made them."""
        self.joined: dict[int, dict[str, Any]] = {}
        """By id of each parameter: the state that its optimizer is to have in the end."""

    def put_in(self) -> None:
        """Hand out pieces, and cut the state that the optimizer has already."""
        for optimizer in self._optimizers:
            self._whole.append([list(group["params"]) for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                owned: list[Tensor] = []
                for whole in group["params"]:
                    pieces = self.pieces_of.get(id(whole))
                    owned += [whole] if pieces is None else [piece.parameter for piece, _ in pieces]
                    if pieces is not None and whole in optimizer.state:
                        state = optimizer.state.pop(whole)
                        for piece, _ in pieces:
                            optimizer.state[piece.parameter] = cut_state(state, whole, piece)
                group["params"] = owned

    def take_out(self) -> None:
        """Give the optimizers back the whole parameters, and the state that was joined for them."""
        for optimizer, groups in zip(self._optimizers, self._whole, strict=True):
            for group, whole in zip(optimizer.param_groups, groups, strict=True):
                for piece in group["params"]:
                    if id(piece) not in self.pieces_of:
                        optimizer.state.pop(piece, None)
                group["params"] = whole
                optimizer.state.update(
                    (parameter, self.joined[id(parameter)])
                    for parameter in whole
                    if id(parameter) in self.joined
                )
        self._whole.clear()
        self.joined.clear()

    def group_sizes(self, optimizer: Optimizer) -> list[int]:
        """Whole parameters in each group of an optimizer."""
        return [len(group) for group in self._whole[list(self._optimizers).index(optimizer)]]


def cut_state(state: dict[str, Any], whole: Tensor, piece: StripPiece) -> dict[str, Any]:
    """The state of a piece, out of that of its parameter: tensors of the same shape are cut."""
    shape = local(whole).shape
    return {
        key: local(value).reshape(-1)[piece.start : piece.stop].clone()
        if isinstance(value, Tensor) and local(value).shape == shape and value.dim()
        else value
        for key, value in state.items()
    }
