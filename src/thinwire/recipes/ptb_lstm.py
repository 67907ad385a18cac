"""ptb-lstm: the word-level LSTM of Zaremba et al. (2014, arXiv:1409.2329), small and medium."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from thinwire.data import find_tokens
from thinwire.recipes.base import Recipe, Target, Training


def ptb_lstm() -> Recipe:
    """Two layers of 200: 4.7 million parameters, most of them in the first and the last layer."""
    return Recipe(
        name="ptb-lstm",
        summary="LSTM (h=200) on Penn Treebank; needs --data DIR with ptb.train.txt and ptb.test.txt",
        training=partial(_training, num_hidden=200, dropout=0.2, scale=0.1),
        target=Target(metric="perplexity", value=105.0, higher_is_better=False),
        epochs=13,
        batch_size=20,
        locate=find_tokens,
    )


def ptb_lstm_650() -> Recipe:
    """Two layers of 650: 19.8 million parameters."""
    return replace(
        ptb_lstm(),
        name="ptb-lstm-650",
        summary="LSTM (h=650) on Penn Treebank; needs --data DIR with ptb.train.txt and ptb.test.txt",
        training=partial(_training, num_hidden=650, dropout=0.5, scale=0.05),
        target=Target(metric="perplexity", value=90.0, higher_is_better=False),
        epochs=20,
    )


def _training(*, num_hidden: int, dropout: float, scale: float) -> Training:
    from thinwire.data import load_tokens
    from thinwire.recipes import lstm, text

    return Training(
        data=lambda folder: text.pieces(load_tokens(folder), length=35, order="streams"),
        model=lambda: lstm.Lstm(num_hidden=num_hidden, dropout=dropout, scale=scale),
        optimizer=partial(lstm.sgd, rate_at_20=20.0),
        schedule=lstm.flat_then_halved,
        loss=text.token_loss,
        score=text.summed_loss,
        metric=text.perplexity,
        forward=lstm.forward,
        clip_norm=0.25,
    )
