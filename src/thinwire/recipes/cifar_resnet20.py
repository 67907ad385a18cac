"""cifar-resnet20: the small residual network of He et al. (2015, arXiv:1512.03385) on CIFAR-10."""

from __future__ import annotations

from functools import partial

from thinwire.data import find_cifar
from thinwire.recipes.base import Recipe, Target, Training


def cifar_resnet20() -> Recipe:
    """ResNet-20, 0.27 million parameters: little traffic for its compute."""
    return Recipe(
        name="cifar-resnet20",
        summary="ResNet-20 on CIFAR-10; needs --data DIR with cifar10.npz or the binary batches",
        training=_training,
        target=Target(metric="accuracy", value=0.86),
        epochs=30,
        batch_size=128,
        locate=find_cifar,
    )


def _training() -> Training:
    from thinwire.data import load_cifar
    from thinwire.recipes import colour, convnets, usual

    return Training(
        data=lambda folder: colour.colour_images(load_cifar(folder)),
        model=convnets.resnet20,
        optimizer=partial(colour.sgd, rate_at_128=0.1),
        schedule=usual.one_cycle,
        loss=usual.cross_entropy,
        score=usual.num_correct,
    )
