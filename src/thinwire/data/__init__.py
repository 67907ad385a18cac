"""Data for training on several workers: who gets which samples, and the ready data sets."""

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.cifar import find_cifar, load_cifar
from thinwire.data.digits import load_digits
from thinwire.data.higgs import find_higgs, load_higgs
from thinwire.data.mnist import find_mnist, load_mnist
from thinwire.data.shards import Shards
from thinwire.data.streams import Streams
from thinwire.data.tokens import Tokens, find_tokens, load_tokens

__all__ = [
    "Arrays",
    "Shards",
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
