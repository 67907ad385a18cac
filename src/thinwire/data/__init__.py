"""Data for training on several workers: who gets which samples, and the ready data sets."""

from typing import TYPE_CHECKING, Any

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.cifar import find_cifar, load_cifar
from thinwire.data.digits import load_digits
from thinwire.data.higgs import find_higgs, load_higgs
from thinwire.data.mnist import find_mnist, load_mnist
from thinwire.data.shards import Shards
from thinwire.data.streams import Streams
from thinwire.data.tokens import Tokens, find_tokens, load_tokens

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
    if name == "ShuffleRing":  # needs torch, for which listing recipes must not wait
        from thinwire.data.ring import ShuffleRing

        return ShuffleRing
    raise AttributeError(f"module 'thinwire.data' has no attribute {name!r}")
