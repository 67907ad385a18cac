"""The package's recipes, one function each; the functions of `trainings` make the parts that need torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.data import find_cifar, find_higgs, find_mnist, find_tokens
from thinwire.errors import check
from thinwire.recipes.base import MetricTarget, Recipe, Training


def _training(name: str, **settings: Any) -> Training:
    from thinwire.recipes import trainings  # which imports torch: only on the workers

    made: Training = getattr(trainings, name)(**settings)
    return made


def _in_the_package(folder: Path | None) -> None:
    hint = "leave --data out; the other recipes need it"
    check(folder is None, "data", "left out: this recipe's data is in the package", str(folder), hint=hint)


def digits_cnn() -> Recipe:
    """A small CNN on 1,797 handwritten digits of 8 x 8 pixels: the default, trained in seconds."""
    return Recipe(
        name="digits-cnn",
        summary="small CNN on 1,797 real handwritten digits (8 x 8); the data is in the package",
        training=partial(_training, "digits"),
        target=MetricTarget(metric="accuracy", value=0.97),
        epochs=20,
        batch_size=16,
        locate=_in_the_package,
    )


def digits_wide() -> Recipe:
    """The same digits with a wide layer, 2.1 M parameters: much traffic for its compute, as large nets."""
    return replace(
        digits_cnn(),
        name="digits-wide",
        summary="the same with a wide layer, 2.1 M parameters, so that a slow network is felt",
        training=partial(_training, "digits", num_hidden=4096),
        epochs=10,
    )


def mnist_cnn() -> Recipe:
    """A small CNN on the 70,000 digits of MNIST, or on Fashion-MNIST, which has the same format."""
    return Recipe(
        name="mnist-cnn",
        summary="small CNN on MNIST (28 x 28); needs --data DIR with its four idx files, plain or .gz",
        training=partial(_training, "mnist"),
        target=MetricTarget(metric="accuracy", value=0.985),
        epochs=3,
        batch_size=32,
        locate=find_mnist,
    )


def cifar_resnet20() -> Recipe:
    """ResNet-20 (He et al., 2015, arXiv:1512.03385), 0.27 M parameters: little traffic for its compute."""
    return Recipe(
        name="cifar-resnet20",
        summary="ResNet-20 on CIFAR-10; needs --data DIR with cifar10.npz or the binary batches",
        training=partial(_training, "cifar", network="resnet20", rate_at_128=0.1),
        target=MetricTarget(metric="accuracy", value=0.86),
        epochs=30,
        batch_size=128,
        locate=find_cifar,
    )


def cifar_vgg16() -> Recipe:
    """VGG-16 (Simonyan et al., 2014, arXiv:1409.1556), 14.7 M parameters: much traffic for its compute."""
    return replace(
        cifar_resnet20(),
        name="cifar-vgg16",
        summary="VGG-16 with batch norm on CIFAR-10; needs --data DIR with cifar10.npz or the binary batches",
        training=partial(_training, "cifar", network="vgg16", rate_at_128=0.05),
        target=MetricTarget(metric="accuracy", value=0.88),
        epochs=20,
    )


def higgs_mlp() -> Recipe:
    """Signal or background? 28 features (Baldi et al., 2014, arXiv:1402.4735): mostly communication."""
    return Recipe(
        name="higgs-mlp",
        summary="dense network on HIGGS; needs --data DIR with higgs.npz",
        training=partial(_training, "higgs"),
        target=MetricTarget(metric="accuracy", value=0.69),
        epochs=10,
        batch_size=64,
        locate=find_higgs,
    )


def ptb_lstm() -> Recipe:
    """The small LSTM of Zaremba et al. (2014, arXiv:1409.2329), h=200: 4.7 million parameters."""
    return Recipe(
        name="ptb-lstm",
        summary="LSTM (h=200) on Penn Treebank; needs --data DIR with ptb.train.txt and ptb.test.txt",
        training=partial(_training, "lstm", num_hidden=200, dropout=0.2, scale=0.1),
        target=MetricTarget(metric="perplexity", value=105.0, higher_is_better=False),
        epochs=13,
        batch_size=20,
        locate=find_tokens,
    )


def ptb_lstm_650() -> Recipe:
    """The medium LSTM of the same paper, h=650: 19.8 million parameters."""
    return replace(
        ptb_lstm(),
        name="ptb-lstm-650",
        summary="LSTM (h=650) on Penn Treebank; needs --data DIR with ptb.train.txt and ptb.test.txt",
        training=partial(_training, "lstm", num_hidden=650, dropout=0.5, scale=0.05),
        target=MetricTarget(metric="perplexity", value=90.0, higher_is_better=False),
        epochs=20,
    )


def text_transformer() -> Recipe:
    """Four transformer blocks of width 256: 5.7 million parameters, close to half of them the embedding."""
    return Recipe(
        name="text-transformer",
        summary="small transformer on Penn Treebank or other text; needs --data DIR with train and test text",
        training=partial(_training, "transformer"),
        target=MetricTarget(metric="perplexity", value=110.0, higher_is_better=False),
        epochs=15,
        batch_size=32,
        locate=find_tokens,
    )
