"""The encoded mean: the same bits on all workers, and no change is lost."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.inline import Inline
from thinwire.compress.codec import Codec, Dense, Largest
from thinwire.engine.endpoint import Endpoint
from thinwire.strategies.local.reduction import encoded_bytes, encoded_mean_
from thinwire.wire.local import LocalWorld
from thinwire.wire.wire import Meter


def reduce_all(codec: Codec, moved: list[Tensor], residuals: list[Tensor]) -> list[int]:
    """Reduce in place on all workers; gives the bytes each has sent."""
    world, inline, meters = LocalWorld(len(moved)), Inline(), [Meter() for _ in moved]
    tasks = []
    for rank, (each, residual, meter) in enumerate(zip(moved, residuals, meters, strict=True)):
        reduce = partial(encoded_mean_, each, residual, codec)
        tasks.append(Endpoint(world.lane(rank), meter).start(inline.driver, "reduce", reduce))
    inline.settle()
    for task in tasks:
        task.wait()
    return [meter.traffic.sent_bytes for meter in meters]


@pytest.mark.parametrize("codec", [Largest(4), Dense("int4"), Dense("int8"), Dense("bf16")], ids=repr)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 700, 4096])
def test_all_get_the_same_and_nothing_is_lost(codec: Codec, world_size: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    residuals = [torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)]
    given, returned = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(3):
        moved = [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(world_size)]
        given += sum(moved)
        sent = reduce_all(codec, moved, residuals)
        assert all(torch.equal(each, moved[0]) for each in moved)
        assert sent == [encoded_bytes(numel, 8, codec, world_size)] * world_size
        returned += world_size * moved[0]
        assert torch.allclose(returned + sum(residuals), given, atol=1e-12)


def test_a_fine_codec_gives_about_the_mean() -> None:
    moved = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    mean = torch.stack(moved).mean(0)
    reduce_all(Dense("int8"), moved, [torch.zeros(5000) for _ in moved])
    assert (moved[0] - mean).norm() < 0.02 * mean.norm()


def test_alone_nothing_changes() -> None:
    moved, residual = torch.randn(100), torch.zeros(100)
    before = moved.clone()
    assert reduce_all(Largest(1), [moved], [residual]) == [0]
    assert torch.equal(moved, before)
