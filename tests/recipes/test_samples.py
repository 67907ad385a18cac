"""Colour images: crops, mirrors and their randomness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.make import write_cifar
from thinwire.data import load_cifar
from thinwire.recipes.samples import colour_images, crop_and_mirror


@pytest.fixture(autouse=True)
def same_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_every_crop_is_a_window_of_the_padded_image_or_its_mirror() -> None:
    images = torch.randint(1, 256, (64, 32, 32, 3), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images, (0, 0, 4, 4, 4, 4))
    places = set()
    for number, crop in enumerate(crop_and_mirror(images)):
        windows = {
            (top, left, mirrored): window.flip(1) if mirrored else window
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            for window in [padded[number, top : top + 32, left : left + 32]]
        }
        found = [place for place, window in windows.items() if torch.equal(window, crop)]
        assert len(found) == 1
        places.add(found[0])
    assert {mirrored for _, _, mirrored in places} == {False, True}
    assert len({top for top, _, _ in places}) == len({left for _, left, _ in places}) == 9


def test_training_images_vary_with_the_generator_and_test_images_do_not(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    data = colour_images(load_cifar(tmp_path))
    batch = np.arange(8)
    first, second = data.train.take(batch)[0], data.train.take(batch)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(data.train.take(batch)[0], first)
    assert torch.equal(data.test.take(batch)[0], data.test.take(batch)[0])
    assert first.shape == (8, 3, 32, 32)
    assert abs(float(data.test.take(np.arange(10))[0].mean())) < 0.5
