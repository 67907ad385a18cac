"""Recipes whose workers keep only their own part of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.data.make import write_text
from tests.recipes.test_train import config, run, with_few_samples
from thinwire.errors import SettingError
from thinwire.events import Evaluated
from thinwire.recipes import registry
from thinwire.recipes.base import Data
from thinwire.recipes.setup import own_part, sample_tensors


def digits() -> Data:
    return registry.get("digits-cnn").training().data(None)


def test_blocks_are_the_whole_and_the_rest_is_forgotten() -> None:
    whole = sample_tensors(digits().train)
    parts = [sample_tensors(own_part(digits(), rank, 4).train) for rank in range(4)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        assert all(part[name].untyped_storage().nbytes() < tensor.nbytes / 3 for part in parts)
    assert [len(part["targets"]) for part in parts] == [359, 359, 359, 360]


def test_a_text_has_its_pieces_held_with_the_token_after_each(tmp_path: Path) -> None:
    write_text(tmp_path)
    data = registry.get("text-transformer").training().data(tmp_path)
    part = own_part(data, 1, 2).train
    first = len(data.train) // 2
    indices = torch.arange(len(part)).numpy()
    for held, original in zip(part.take(indices), data.train.take(first + indices), strict=True):
        assert torch.equal(held, original)


def test_what_cannot_be_held_in_parts_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    streams = registry.get("ptb-lstm").training().data(tmp_path)
    with pytest.raises(SettingError, match="shuffle must be 'dealt' for a text that is read in streams"):
        own_part(streams, 0, 2)
    few = with_few_samples(registry.get("digits-cnn")).training().data(None)
    with pytest.raises(SettingError, match="shuffle must be 'dealt' for samples of type First"):
        own_part(few, 0, 2)


@pytest.mark.parametrize("shuffle", ["own", "ring"])
def test_one_worker_has_everything(shuffle: str) -> None:
    recipe = registry.get("digits-cnn")
    records = run(recipe, replace(config(epochs=2, batch_size=32), shuffle=shuffle))
    values = [record.value for record in records if isinstance(record, Evaluated)]
    assert len(values) == 2
    assert values[-1] is not None
    assert values[-1] > 0.9
