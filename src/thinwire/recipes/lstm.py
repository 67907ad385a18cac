"""A word-level LSTM whose state goes on from batch to batch, and the SGD it is trained with."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from thinwire.data.tokens import MAX_WORDS
from thinwire.recipes.base import Carried, Plan


class Lstm(nn.Module):
    """Two layers, with dropout between layers but not from step to step."""

    def __init__(self, *, num_hidden: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MAX_WORDS, num_hidden)
        self.lstm = nn.LSTM(num_hidden, num_hidden, num_layers=2, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.output = nn.Linear(num_hidden, MAX_WORDS)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -scale, scale)

    def forward(self, tokens: Tensor, carried: Carried = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores of the next word at each place, and the state after the last one."""
        outputs, state = self.lstm(self.drop(self.embedding(tokens)), carried)
        return self.output(self.drop(outputs)), state


def forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """Go on from the state of the last batch; gradients end there."""
    outputs, state = model(inputs, carried)
    return cast("Tensor", outputs), tuple(part.detach() for part in state)


def sgd(model: nn.Module, plan: Plan, *, rate_at_20: float) -> Optimizer:
    """Plain SGD; gradients are clipped, so the rate grows with the square root of the global batch size."""
    return SGD(model.parameters(), lr=rate_at_20 * (plan.global_batch_size / 20) ** 0.5)


def flat_then_halved(optimizer: Optimizer, plan: Plan) -> LRScheduler:
    """The full rate for a third of the run, then smoothly down to half of it for every thirteenth more."""

    def factor(step: int) -> float:
        return math.exp2(min(0.0, 13 / 3 - 13 * step / plan.num_steps))

    return LambdaLR(optimizer, factor)
