"""mnist-cnn: the classic, from a folder of idx files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from thinwire.recipes.base import Recipe, Target, Training


def mnist_cnn() -> Recipe:
    """A small CNN on the 70,000 digits of MNIST, or on Fashion-MNIST, which has the same format."""
    return Recipe(
        name="mnist-cnn",
        summary="small CNN on MNIST (28 x 28); needs --data DIR with its four idx files, plain or .gz",
        training=_training,
        target=Target(metric="accuracy", value=0.985),
        epochs=3,
        batch_size=32,
        locate=_locate,
    )


def _locate(folder: Path | None) -> None:
    from thinwire.data import find_mnist

    find_mnist(folder)


def _training() -> Training:
    from thinwire.data import load_mnist
    from thinwire.recipes import images, usual

    return Training(
        data=lambda folder: images.grey_images(load_mnist(folder), highest=255),
        model=lambda: images.small_cnn(side=28, num_pools=2, num_hidden=64),
        optimizer=partial(usual.adamw, rate_at_64=0.003),
        schedule=usual.one_cycle,
        loss=usual.cross_entropy,
        score=usual.num_correct,
    )
