"""Small models with layers to split, and their batches: 12 samples, for 2, 4 (3 each) and 6 workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

BATCH = 12


class Convolutions(nn.Module):
    """As VGG: convolutions, then dense layers that hold most weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 5, 3, padding=1),
            nn.Tanh(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(45, 24), nn.Tanh(), nn.Linear(24, 30), nn.Tanh(), nn.Linear(30, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


def perceptron() -> nn.Module:
    widths = [9, 30, 12, 18, 13, 24, 12, 7]
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Transformer(nn.Module):
    """One block, with an embedding that is larger than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 18, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embedding(x)))
        return out.mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


@dataclass(frozen=True)
class Case:
    """A model, the shape of its samples, and the layers to split."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    layers: Sequence[str]
    outputs: int
    words: int = 0
    """If samples are words, how many there are."""

    def model(self) -> nn.Module:
        model = self.make().double()
        generator = torch.Generator().manual_seed(3)  # of its own: workers may be threads
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(noise * parameter[0].numel() ** -0.5)
        return model

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 + number)
        shape = (BATCH, *self.sample)
        y = torch.randint(self.outputs, (BATCH,), generator=generator)
        if self.words:
            return torch.randint(self.words, shape, generator=generator), y
        return torch.randn(shape, generator=generator, dtype=torch.float64), y


CASES = {
    "cnn": Case(Convolutions, (2, 6, 6), ["classifier.*"], 6),
    "mlp": Case(perceptron, (9,), ["0", "2", "4", "6", "8", "10", "12"], 7),
    "transformer": Case(Transformer, (5,), ["embedding", "block.linear*", "head"], 18, words=60),
    "lstm": Case(Recurrent, (4, 7), ["lstm", "head"], 11),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: range, rows: slice = slice(None)
) -> None:
    """Steps with these rows of each batch."""
    for number in steps:
        x, y = case.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
