"""Data for training on several workers: which worker gets which samples, and loaders of data sets."""

from typing import TYPE_CHECKING, Any

from thinwire.data.files import (
    Arrays,
    Tokens,
    TrainTest,
    find_cifar,
    find_higgs,
    find_mnist,
    find_tokens,
    load_cifar,
    load_digits,
    load_higgs,
    load_mnist,
    load_tokens,
)
from thinwire.data.shards import Shards, Streams

if TYPE_CHECKING:
    from thinwire.data.ring import ShuffleRing

__all__ = [
    "Arrays",
    "Shards",
    "ShuffleRing",
    "Streams",
    "Tokens",
    "TrainTest",
    "find_cifar",
    "find_higgs",
    "find_mnist",
    "find_tokens",
    "load_cifar",
    "load_digits",
    "load_higgs",
    "load_mnist",
    "load_tokens",
]


def __getattr__(name: str) -> Any:
    if name == "ShuffleRing":  # needs torch, which listing recipes must not import
        from thinwire.data.ring import ShuffleRing

        return ShuffleRing
    raise AttributeError(f"module 'thinwire.data' has no attribute {name!r}")
