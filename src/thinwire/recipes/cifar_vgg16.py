"""cifar-vgg16: VGG-16 (Simonyan and Zisserman, 2014, arXiv:1409.1556) on CIFAR-10, with batch norm."""

from __future__ import annotations

from functools import partial

from thinwire.data import find_cifar
from thinwire.recipes.base import Recipe, Target, Training


def cifar_vgg16() -> Recipe:
    """VGG-16, 14.7 million parameters: much traffic for its compute."""
    return Recipe(
        name="cifar-vgg16",
        summary="VGG-16 with batch norm on CIFAR-10; needs --data DIR with cifar10.npz or the binary batches",
        training=_training,
        target=Target(metric="accuracy", value=0.88),
        epochs=20,
        batch_size=128,
        locate=find_cifar,
    )


def _training() -> Training:
    from thinwire.data import load_cifar
    from thinwire.recipes import colour, convnets, usual

    return Training(
        data=lambda folder: colour.colour_images(load_cifar(folder)),
        model=convnets.vgg16,
        optimizer=partial(colour.sgd, rate_at_128=0.05),
        schedule=usual.one_cycle,
        loss=usual.cross_entropy,
        score=usual.num_correct,
    )
