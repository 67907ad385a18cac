"""higgs-mlp: signal or background, from 28 numbers per collision (Baldi et al., 2014, arXiv:1402.4735)."""

from __future__ import annotations

from functools import partial

from thinwire.data import find_higgs
from thinwire.recipes.base import Recipe, Target, Training


def higgs_mlp() -> Recipe:
    """A dense network on a table: so little compute that communication is nearly all."""
    return Recipe(
        name="higgs-mlp",
        summary="dense network on HIGGS; needs --data DIR with higgs.npz",
        training=_training,
        target=Target(metric="accuracy", value=0.69),
        epochs=10,
        batch_size=64,
        locate=find_higgs,
    )


def _training() -> Training:
    from thinwire.data import load_higgs
    from thinwire.recipes import tables, usual

    return Training(
        data=lambda folder: tables.rows(load_higgs(folder)),
        model=tables.mlp,
        optimizer=partial(usual.adamw, rate_at_64=0.002),
        schedule=usual.one_cycle,
        loss=usual.cross_entropy,
        score=usual.num_correct,
    )
