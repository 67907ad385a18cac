"""What the text recipes share: pieces of a text as samples, the loss of a language model, perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire.data import Tokens
from thinwire.errors import DataError
from thinwire.recipes.base import Data


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a text, each with the token after it; the targets are the tokens one place further on."""

    tokens: Tensor
    """Of shape (samples, length + 1)."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both of shape (samples, length)."""
        pieces = self.tokens[torch.from_numpy(indices).to(self.tokens.device)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def pieces(tokens: Tokens, *, length: int, order: Literal["shuffled", "streams"]) -> Data:
    """Both texts in pieces of `length` tokens."""

    def samples(text: NDArray[np.int64]) -> Pieces:
        if len(text) <= length:
            raise DataError(f"a text has {len(text)} tokens, less than one piece of {length} and its next")
        return Pieces(torch.tensor(text).unfold(0, length + 1, length))  # a view: nothing is stored twice

    return Data(samples(tokens.train), samples(tokens.test), order)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens of the batch."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each piece, summed over the batch."""
    return token_loss(outputs, targets) * len(targets)


def perplexity(loss: float) -> float:
    """exp of the mean loss per token; lower is better."""
    return math.exp(min(loss, 700.0))  # past that a float overflows, and the run has failed anyway
