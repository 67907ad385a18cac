"""Data for training on several workers: who gets which samples, and the ready data sets."""

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.digits import load_digits
from thinwire.data.mnist import find_mnist, load_mnist
from thinwire.data.shards import Shards

__all__ = ["Arrays", "Shards", "TrainTest", "find_mnist", "load_digits", "load_mnist"]
