"""Data sets as samples that are taken by index: tables, grey and colour images, pieces of text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire.data import Tokens, TrainTest
from thinwire.errors import DataError
from thinwire.recipes.base import Data

_MARGIN = 4
"""Pixels that a crop may be off the centre."""
# mean and standard deviation of CIFAR-10's training pixels, by colour, as shares of 255
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)


Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TensorSamples:
    """Inputs with their classes. Images are stored as bytes, a quarter of the memory, and converted late."""

    inputs: Tensor
    targets: Tensor
    convert: Convert
    """Turns the stored inputs of a batch into those of the model."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        where = torch.from_numpy(indices).to(self.inputs.device)
        return self.convert(self.inputs[where]), self.targets[where]


def as_tensors(
    arrays: TrainTest, convert: Convert = lambda inputs: inputs, convert_test: Convert | None = None
) -> Data:
    """Hold both parts of a data set as tensors; the test part may have a conversion of its own."""
    # copies: arrays read from files are read-only, which tensors cannot be
    parts = [(torch.tensor(part.inputs), torch.tensor(part.targets)) for part in (arrays.train, arrays.test)]
    return Data(TensorSamples(*parts[0], convert), TensorSamples(*parts[1], convert_test or convert))


def grey_images(arrays: TrainTest, highest: int) -> Data:
    """Scale pixels of 0 to `highest` to 0..1; a batch is (samples, 1, height, width)."""
    return as_tensors(arrays, lambda images: images.unsqueeze(1).float().div_(highest))


def colour_images(arrays: TrainTest) -> Data:
    """Normalise bytes n x height x width x 3; only training images are augmented.

    Colours are stored last, so that cropping a batch is one gather; a batch is (samples, 3, height, width).
    """
    return as_tensors(arrays, lambda images: _normalised(crop_and_mirror(images)), _normalised)


def _normalised(images: Tensor) -> Tensor:
    mean, deviation = (_colours(values, images.device) for values in (_MEAN, _DEVIATION))
    return ((images.float() - mean) / deviation).permute(0, 3, 1, 2).contiguous()


@functools.cache
def _colours(shares: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(shares, device=device) * 255


def crop_and_mirror(images: Tensor) -> Tensor:
    """Move each image by up to four pixels both ways, filling with black, and mirror every second one.

    The random numbers come from torch's generator on the CPU, which the training loop seeds per worker: it
    gives the same crops on every device.
    """
    count, height, width, _ = images.shape
    padded = nn.functional.pad(images, (0, 0, _MARGIN, _MARGIN, _MARGIN, _MARGIN))
    top, left = torch.randint(0, 2 * _MARGIN + 1, (2, count, 1), device="cpu")
    mirrored = torch.randint(0, 2, (count, 1), device="cpu")
    columns = torch.arange(width, device="cpu")
    rows = torch.arange(height, device="cpu") + top
    columns = torch.where(mirrored == 1, width - 1 - columns, columns) + left
    number = torch.arange(count, device=images.device).view(count, 1, 1)
    rows, columns = torch.cat((rows, columns), dim=1).to(images.device).split((height, width), dim=1)
    return padded[number, rows.view(count, height, 1), columns.view(count, 1, width)]


@dataclass(frozen=True, slots=True)
class TextSamples:
    """Pieces of a text, each with the token after it; the targets are the tokens one place further on."""

    tokens: Tensor
    """Shape (samples, length + 1)."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pieces = self.tokens[torch.from_numpy(indices).to(self.tokens.device)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def text_pieces(tokens: Tokens, *, length: int, order: Literal["shuffled", "streams"]) -> Data:
    """Cut both texts into pieces of `length` tokens."""
    shortest = min(len(tokens.train), len(tokens.test))
    if shortest <= length:
        raise DataError(f"a text has {shortest} tokens, less than one piece of {length} and its next")
    # views: nothing is stored twice
    pieces = [torch.tensor(text).unfold(0, length + 1, length) for text in (tokens.train, tokens.test)]
    return Data(TextSamples(pieces[0]), TextSamples(pieces[1]), order)
