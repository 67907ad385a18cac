"""digits-cnn: the default recipe; real data, in the package, trained in seconds."""

from __future__ import annotations

from functools import partial

from thinwire.recipes.base import Recipe, Target, Training


def digits_cnn() -> Recipe:
    """A small CNN on 1,797 handwritten digits of 8 x 8 pixels."""
    return Recipe(
        name="digits-cnn",
        summary="small CNN on 1,797 real handwritten digits (8 x 8); the data is in the package",
        training=_training,
        target=Target(metric="accuracy", value=0.97),
        epochs=20,
        batch_size=16,
    )


def _training() -> Training:
    from thinwire.data import load_digits
    from thinwire.recipes import images, usual

    return Training(
        data=lambda folder: images.grey_images(load_digits(), highest=16),
        model=lambda: images.small_cnn(side=8, num_pools=1, num_hidden=64),
        optimizer=partial(usual.adamw, rate_at_64=0.01),
        schedule=usual.one_cycle,
        loss=usual.cross_entropy,
        score=usual.num_correct,
    )
