"""Networks of every kind that apoptosis can shrink, in float64, with batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": nn.LeakyReLU,
    "linear": nn.Identity,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def mlp(width: int, activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Linear(6, width),
        act(),
        nn.Dropout(0.2),
        nn.Linear(width, width + 1),
        act(),
        nn.Linear(width + 1, 3),
    )


def normed_mlp(width: int, activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Linear(6, width, bias=False),
        nn.BatchNorm1d(width),
        act(),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        act(),
        nn.Linear(width, 3),
    )


def conv2d(width: int, activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        act(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(width * 9, 5),
        act(),
        nn.Linear(5, 3),
    )


def conv1d(width: int, activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Conv1d(2, width, 3),
        act(),
        nn.Conv1d(width, width, 3, groups=width),
        nn.Conv1d(width, 4, 1),
        act(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Residual(nn.Module):
    """Two branches that end in the same sum."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.act = nn.BatchNorm1d(width), ACTIVATIONS[activation]()
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        x = self.act(x + self.norm(self.first(x)))
        x = x + self.second(x)
        result: Tensor = self.head(x)
        return result


class Concatenation(nn.Module):
    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, width), nn.Linear(6, width + 2)
        self.act, self.head = ACTIVATIONS[activation](), nn.Linear(2 * width + 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], dim=-1)
        result: Tensor = self.head(self.act(both))
        return result


class Recurrent(nn.Module):
    """Reads the six features as a sequence."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x[..., None])[0][:, -1])
        return result


class Gated(nn.Module):
    """Embedded words, read by a GRU."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(5, width), nn.GRU(width, width + 2, batch_first=True)
        self.act, self.head = ACTIVATIONS[activation](), nn.Linear(width + 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 2).round().long() % 5
        result: Tensor = self.head(self.act(self.gru(self.embedding(words))[0]).mean(1))
        return result


class Block(nn.Module):
    """A transformer block: the MLP inside of it shrinks, the width of the stream does not."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.dense = nn.Sequential(nn.Linear(8, width), ACTIVATIONS[activation](), nn.Linear(width, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[..., None])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.dense(self.norm(x))
        result: Tensor = self.head(x.mean(dim=1))
        return result


class Tied(nn.Module):
    """One layer is used twice, and two layers share a weight."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.into, self.twice = nn.Linear(6, width), nn.Linear(width, width)
        self.act, self.head, self.same = ACTIVATIONS[activation](), nn.Linear(width, 3), nn.Linear(width, 3)
        self.same.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.into(x))
        x = self.act(self.twice(self.act(self.twice(x))))
        result: Tensor = self.head(x) + self.same(x)
        return result


KINDS: dict[str, Callable[[int, str], nn.Module]] = {
    "mlp": mlp,
    "batch norm": normed_mlp,
    "conv2d": conv2d,
    "conv1d": conv1d,
    "residual": Residual,
    "concatenation": Concatenation,
    "lstm": Recurrent,
    "gru": Gated,
    "transformer": Block,
    "tied": Tied,
}
SHAPES = {"conv2d": (2, 6, 6), "conv1d": (2, 6)}


def make(kind: str, width: int, activation: str, seed: int) -> tuple[nn.Module, Tensor]:
    """A network that has seen some data, and a batch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind](width, activation).double()
    batch = torch.randn(32, *SHAPES.get(kind, (6,)), generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model(batch)  # statistics of batch norm
    return model, batch
