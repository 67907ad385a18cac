"""Small models and their batches, made to show any difference between one worker and several.

A batch has 12 samples, so that 2, 3 and 4 workers take equal parts of it. Nothing looks across samples
(no batch norm) and nothing is random, so the mean of the parts' gradients is the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

BATCH = 12
NUM_CLASSES = 4
WORDS, LENGTH, WIDTH, HEADS = 11, 5, 8, 2
MARK = 0
"""A text that begins with this word, and only such a text, uses the adapter."""

Batch = tuple[Tensor, Tensor]


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, NUM_CLASSES),
    )


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cells(x)[0]
        logits: Tensor = self.head(states[:, -1])
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        # No bias: that of the keys has no gradient but rounding, which AdamW would blow up.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        after: Tensor = x + self.mlp(self.before_mlp(x))
        return after


class _Transformer(nn.Module):
    """Words in and out are tied, one block serves twice, the adapter serves marked texts, `spare` nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.twice = _Block()
        self.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        h: Tensor = self.words(words) + self.places
        h = self.twice(self.twice(h))
        marked = words[:, 0] == MARK
        if marked.any():
            h = h + marked.view(-1, 1, 1) * self.adapter(h)
        logits: Tensor = self.head(h)
        return logits.transpose(1, 2)  # classes second, as cross_entropy wants them


def _points(step: int) -> Batch:
    return _labelled((BATCH, 10), step)


def _images(step: int) -> Batch:
    return _labelled((BATCH, 2, 8, 8), step)


def _sequences(step: int) -> Batch:
    return _labelled((BATCH, 5, 6), step)


def _labelled(shape: tuple[int, ...], step: int) -> Batch:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    flat = x.flatten(1)
    return x, flat[:, :NUM_CLASSES].argmax(1)


def _texts(step: int) -> Batch:
    """Texts to continue. Marked are: one text of the first worker; half of the texts; none; by turns."""
    words = torch.randint(1, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    if step % 3 == 0:
        words[0, 0] = MARK
    elif step % 3 == 1:
        words[::2, 0] = MARK
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the batches it learns from."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The same weights every time; the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(dtype)

    def part(self, step: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
        """One worker's equal part of a step's batch."""
        share = BATCH // world_size
        x, y = (t[rank * share : (rank + 1) * share] for t in self.batch(step))
        return (x.to(dtype) if x.is_floating_point() else x), y


CASES = {
    "mlp": Case(_mlp, _points),
    "cnn": Case(_cnn, _images),
    "lstm": Case(_Lstm, _sequences),
    "transformer": Case(_Transformer, _texts),
}
