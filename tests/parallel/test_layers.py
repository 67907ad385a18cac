"""Layers that cannot be split are refused by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.parallel.nets import CASES, Transformer
from thinwire.parallel.layers import candidates


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Odd(nn.Module):
    """Layers that look as if they could be split."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.words = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.words.weight
        self.doubled = Doubled(4, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
        self.sparse = nn.Embedding(10, 4, sparse=True)
        self.both = nn.LSTM(4, 4, bidirectional=True)
        self.attention = nn.MultiheadAttention(4, 2)
        self.good = nn.Linear(4, 8)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("conv", "a Conv1d is not an nn.Linear, nn.Embedding or nn.LSTM"),
        ("words", "its weight is tied: words.weight and head.weight"),
        ("head", "its weight is tied: words.weight and head.weight"),
        ("doubled", "Doubled has a forward of its own"),
        ("normed", "its weight is made by a parametrization"),
        ("sparse", "sparse, max_norm and scale_grad_by_freq need the whole table"),
        ("both", "it is bidirectional"),
        ("attention.out_proj", "nn.MultiheadAttention uses its weight without calling it"),
    ],
)
def test_layers_that_cannot_be_split(layer: str, why: str) -> None:
    with pytest.raises(tw.errors.SettingError, match=f"{layer} cannot be split: {why}\n.*: good"):
        tw.parallel.hybridize(Odd(), groups=1, layers=[layer])


def test_unknown_names() -> None:
    with pytest.raises(tw.errors.SettingError, match=r"layers must be names .* got 'body'\n.*: good"):
        tw.parallel.hybridize(Odd(), groups=1, layers=["body"])
    with pytest.raises(tw.errors.SettingError, match=r"layers must be an nn.Linear.* got 'con\*'"):
        tw.parallel.hybridize(Odd(), groups=1, layers=["con*"])
    with pytest.raises(
        tw.errors.SettingError, match=r"layers must be a list of names, or \"auto\", got 'good'"
    ):
        tw.parallel.hybridize(Odd(), groups=1, layers="good")


def test_a_pattern_takes_what_can_be_split() -> None:
    plan = tw.parallel.hybridize(CASES["cnn"].model(), groups=1, layers=["classifier.*"])
    assert [layer.name for layer in plan.layers] == ["classifier.0", "classifier.2", "classifier.4"]
    assert not plan.styles  # a world of one


def test_candidates() -> None:
    names = [candidate.name for candidate in candidates(Transformer())]
    assert names == ["embedding", "block.linear1", "block.linear2", "head"]
    assert [candidate.split for candidate in candidates(Transformer())] == [
        "colwise",
        "colwise",
        "rowwise",
        "colwise",
    ]
