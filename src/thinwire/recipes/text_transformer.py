"""text-transformer: a small decoder-only transformer, pre-norm, on word-level text."""

from __future__ import annotations

from functools import partial

from thinwire.data import find_tokens
from thinwire.recipes.base import Recipe, Target, Training


def text_transformer() -> Recipe:
    """Four blocks of width 256: 5.7 million parameters, close to half of them the shared embedding."""
    return Recipe(
        name="text-transformer",
        summary="small transformer on Penn Treebank or other text; needs --data DIR with train and test text",
        training=_training,
        target=Target(metric="perplexity", value=110.0, higher_is_better=False),
        epochs=15,
        batch_size=32,
        locate=find_tokens,
    )


def _training() -> Training:
    from thinwire.data import load_tokens
    from thinwire.recipes import text, transformer, usual

    return Training(
        data=lambda folder: text.pieces(load_tokens(folder), length=64, order="shuffled"),
        model=lambda: transformer.Transformer(length=64, width=256, num_blocks=4, num_heads=4, dropout=0.3),
        optimizer=partial(transformer.adamw, rate_at_32=0.001),
        schedule=usual.one_cycle,
        loss=text.token_loss,
        score=text.summed_loss,
        metric=text.perplexity,
        clip_norm=1.0,
    )
