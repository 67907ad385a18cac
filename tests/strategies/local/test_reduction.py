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
from thinwire.wire.wire import Meter, Wire


def reduce_all(codec: Codec, moved: list[Tensor], backlogs: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Reduce in place on all workers; gives the bytes each has sent, and what each has kept."""
    world, inline, meters = LocalWorld(len(moved)), Inline(), [Meter() for _ in moved]
    kept = [torch.empty(0)] * len(moved)

    async def reduce(rank: int, wire: Wire) -> None:
        kept[rank] = await encoded_mean_(moved[rank], backlogs[rank], codec, wire)

    tasks = [
        Endpoint(world.lane(rank), meter).start(inline.driver, "reduce", partial(reduce, rank))
        for rank, meter in enumerate(meters)
    ]
    inline.settle()
    for task in tasks:
        task.wait()
    return [meter.traffic.sent_bytes for meter in meters], kept


@pytest.mark.parametrize(
    "codec", [Largest(4), Dense("sign"), Dense("int4"), Dense("int8"), Dense("bf16")], ids=repr
)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 700, 4096])
def test_all_get_the_same_and_nothing_is_lost(codec: Codec, world_size: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    kept, backlogs = ([torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)] for _ in range(2))
    given, returned = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(3):
        new = [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(world_size)]
        given += sum(new)
        moved = [each + before for each, before in zip(new, kept, strict=True)]
        sent, kept = reduce_all(codec, moved, backlogs)
        assert all(torch.equal(each, moved[0]) for each in moved)
        assert sent == [encoded_bytes(numel, 8, codec, world_size)] * world_size
        returned += world_size * moved[0]
        assert torch.allclose(returned + sum(kept) + sum(backlogs), given, atol=1e-12)


def test_a_backlog_of_another_layout_is_passed_on() -> None:
    """After a change of workers, sums lie with workers that do not own them."""
    codec, numel = Dense("bf16"), 2048
    backlogs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    total = torch.stack(backlogs).sum(0)
    moved = [torch.zeros(numel) for _ in backlogs]
    reduce_all(codec, moved, backlogs)
    assert (3 * moved[0] - total).norm() < 0.02 * total.norm()
    assert all(backlog.norm() < 0.02 * total.norm() for backlog in backlogs)


def test_what_is_not_shown_is_kept_by_its_worker() -> None:
    moved = [torch.zeros(512) for _ in range(2)]
    moved[0][:3] = torch.tensor([1.0, -3.0, 2.0])
    _, kept = reduce_all(Largest(1), moved, [torch.zeros(512) for _ in moved])
    assert kept[0][:3].tolist() == pytest.approx([1.0, 0.0, 2.0], abs=0.02)
    assert not kept[1].any()
    assert moved[1][1].item() == pytest.approx(-1.5, abs=0.02)


def test_a_fine_codec_gives_about_the_mean() -> None:
    moved = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    mean = torch.stack(moved).mean(0)
    reduce_all(Dense("int8"), moved, [torch.zeros(5000) for _ in moved])
    assert (moved[0] - mean).norm() < 0.02 * mean.norm()


def test_alone_nothing_changes() -> None:
    moved, backlog = torch.randn(100), torch.zeros(100)
    before = moved.clone()
    sent, kept = reduce_all(Largest(1), [moved], [backlog])
    assert sent == [0]
    assert torch.equal(moved, before)
    assert not kept[0].any()
