"""The recipes' networks: three for images, one for tables, two for text."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from thinwire.data.files import MAX_WORDS
from thinwire.recipes.base import Carried


def small_cnn(*, side: int, num_pools: int, num_hidden: int) -> nn.Module:
    """Build two convolutions and two dense layers, for grey images of `side` x `side` pixels, ten classes.

    Group norm, not batch norm: the output for a sample then depends on no other sample, so splitting a batch
    over several workers changes nothing.
    """
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    pools = [nn.MaxPool2d(2)] * (num_pools - 1)
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
    hidden = [nn.Flatten(), nn.Linear(32 * (side >> num_pools) ** 2, num_hidden), nn.ReLU()]
    output = [nn.Dropout(0.25), nn.Linear(num_hidden, 10)]
    return nn.Sequential(*first, *pools, *second, nn.Dropout(0.25), *hidden, *output)


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut that has no parameters."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.stride = num_out // num_in  # groups that double the channels halve the image
        self.num_new = num_out - num_in
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.num_new))
        return nn.functional.relu(self.body(x) + shortcut)


def resnet20() -> nn.Module:
    """Build ResNet-20 for 32 x 32 colour images: three groups of three blocks, of 16, 32 and 64 channels."""
    channels = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [ResidualBlock(num_in, num_out) for num_in, num_out in pairwise(channels)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return _initialised(nn.Sequential(*stem, *blocks, *head))


def vgg16() -> nn.Module:
    """Build VGG-16's convolutions with batch norm, and one dense layer instead of three."""
    layers: list[nn.Module] = []
    channels = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for depth, (num_in, num_out) in enumerate(pairwise(channels), start=1):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)]
        layers.append(nn.ReLU(inplace=True))
        if depth in (2, 4, 7, 10, 13):
            layers.append(nn.MaxPool2d(2))
    return _initialised(nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 10)))


def _initialised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def mlp() -> nn.Module:
    """Build three hidden layers of 256 for 28 features and two classes."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise((28, 256, 256, 256)):
        layers += [nn.Linear(num_in, num_out), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(256, 2))


class WordLstm(nn.Module):
    """A two-layer word-level LSTM, with dropout between layers but not from step to step."""

    def __init__(self, *, num_hidden: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MAX_WORDS, num_hidden)
        self.lstm = nn.LSTM(num_hidden, num_hidden, num_layers=2, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.output = nn.Linear(num_hidden, MAX_WORDS)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -scale, scale)

    def forward(self, tokens: Tensor, carried: Carried = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the scores of the next word at each place, and the state after the last one."""
        outputs, state = self.lstm(self.drop(self.embedding(tokens)), carried)
        return self.output(self.drop(outputs)), state


def lstm_forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """Continue from the state of the last batch; gradients end there."""
    outputs, state = model(inputs, carried)
    return cast("Tensor", outputs), tuple(part.detach() for part in state)


class TransformerBlock(nn.Module):
    """Causal self-attention, then a dense layer for each place; each is added to its input (pre-norm)."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = (
            part.view(count, length, self.num_heads, -1).transpose(1, 2)
            for part in self.project_in(self.before_attention(x)).chunk(3, dim=2)
        )
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.project_out(seen.transpose(1, 2).reshape(count, length, width)))
        return torch.add(x, self.drop(self.dense(x)))


class Transformer(nn.Module):
    """A small decoder-only transformer whose output layer shares the embedding's weights."""

    def __init__(self, *, length: int, width: int, num_blocks: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MAX_WORDS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width=width, num_heads=num_heads, dropout=dropout) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)
        # torch's default (std 1) would give huge outputs, as this is also the output layer
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next word at each place."""
        x = self.drop(self.embedding(tokens) + self.places[: tokens.shape[1]])
        return nn.functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
