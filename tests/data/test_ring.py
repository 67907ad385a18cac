"""Samples that wander from worker to worker."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import thinwire as tw
from tests.data.linked import run_linked, with_link
from tests.worlds import run_threads
from thinwire.data import ShuffleRing, ring
from thinwire.data.ring import Remainder
from thinwire.errors import DataError, PeerDiffers, PeerLost, SettingError, UsageError
from thinwire.wire.base import Lane

WORLDS = [
    pytest.param([24], id="1"),
    pytest.param([24, 24], id="2"),
    pytest.param([24, 24, 24], id="3"),
    pytest.param([24, 25, 31], id="3-uneven"),
    pytest.param([17] * 5, id="5"),
    pytest.param([9, 40, 10, 11, 9], id="5-uneven"),
]


def numbers(counts: Sequence[int], rank: int) -> Tensor:
    """The numbers of the samples that a worker starts with."""
    last = list(accumulate(counts))[rank]
    return torch.arange(last - counts[rank], last)


class Held:
    """A worker's samples: everything in them follows from their number, so that what does not is noticed."""

    def __init__(self, link: tw.Link, counts: Sequence[int], *, remainder: Remainder = "drop") -> None:
        self.labels = numbers(counts, link.rank)
        self.images = torch.stack([image(int(n)) for n in self.labels])
        self.odd = self.labels % 2 == 1
        self.texts = [text(int(n)) for n in self.labels]
        self.ring = ShuffleRing(
            self.images, self.labels, self.texts, self.odd, link=link, seed=7, remainder=remainder
        )

    def go(self, until: int, batch_size: int) -> list[list[int]]:
        """The numbers used in each epoch before `until`, all else being checked against them."""
        used = []
        for epoch in range(self.ring.epoch + (len(self.ring) == 0), until):
            self.ring.set_epoch(epoch)
            used.append([n for batch in self.ring.batches(batch_size) for n in self.check(batch)])
        return used

    def check(self, batch: NDArray[np.int64]) -> list[int]:
        images, labels, texts, odd = self.ring.take(batch)
        for i, n in enumerate(labels.tolist()):
            assert torch.equal(images[i], image(n))
            assert torch.equal(texts[i], text(n))
            assert bool(odd[i]) == (n % 2 == 1)
        return [int(n) for n in labels]


def image(number: int) -> Tensor:
    return torch.full((3, 1), number % 251, dtype=torch.uint8)


def text(number: int) -> Tensor:
    """Some are empty, some are long."""
    return torch.arange(number % 7 * (number % 3), dtype=torch.int32) + number


@pytest.mark.parametrize("counts", WORLDS)
@pytest.mark.parametrize("remainder", ["drop", "uneven"])
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_nothing_is_lost_and_everything_is_used_once(
    counts: list[int], remainder: Remainder, batch_size: int
) -> None:
    def work(link: tw.Link) -> tuple[list[list[int]], list[int], int]:
        held = Held(link, counts, remainder=remainder)
        used = held.go(3, batch_size)
        return used, held.labels.tolist(), link.stats.messages

    results = run_linked(len(counts), work)
    everything = Counter(range(sum(counts)))
    assert Counter(n for _, labels, _ in results for n in labels) == everything
    assert [len(labels) for _, labels, _ in results] == counts
    for epoch in range(3):
        seen = Counter(n for used, _, _ in results for n in used[epoch])
        if remainder == "uneven":
            assert seen == everything
        else:
            assert set(seen.values()) == {1}
            assert {len(used[epoch]) for used, _, _ in results} == {min(counts)}
    if len(counts) == 1:
        assert results[0][2] == 0


def test_samples_spread_over_all_workers_in_one_epoch() -> None:
    counts = [200] * 4

    def work(link: tw.Link) -> tuple[list[int], list[int]]:
        held = Held(link, counts)
        held.go(1, 8)
        after_one = held.labels.tolist()
        held.go(4, 8)
        return after_one, held.labels.tolist()

    results = run_linked(4, work)
    for after_one, _ in results:
        homes = Counter(n // 200 for n in after_one)
        assert len(homes) == 4
        assert all(35 <= count <= 65 for count in homes.values())  # a quarter of each, but for the shuffle
    later = [set(labels) for _, labels in results]
    for rank in range(4):
        at_home = sum(n // 200 == rank for n in later[rank])
        assert 25 <= at_home <= 75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_samples_on_a_gpu_travel_too() -> None:
    def work(link: tw.Link) -> tuple[list[int], bool]:
        labels = numbers([30, 30], link.rank).cuda()
        texts = [text(int(n)).cuda() for n in labels]
        shuffle = ShuffleRing(labels, texts, link=link)
        for batch in shuffle.batches(4):
            taken, words = shuffle.take(batch)
            assert all(torch.equal(word.cpu(), text(int(n))) for word, n in zip(words, taken, strict=True))
        return labels.tolist(), all(word.is_cuda for word in texts)

    results = run_linked(2, work)
    assert Counter(n for labels, _ in results for n in labels) == Counter(range(60))
    assert all(on_gpu for _, on_gpu in results)


@pytest.mark.parametrize("counts", [WORLDS[1], WORLDS[-1]])
def test_every_sample_is_used_by_several_workers(counts: list[int]) -> None:
    def work(link: tw.Link) -> set[int]:
        return {n for epoch in Held(link, counts).go(25, 5) for n in epoch}

    used_by = Counter(n for used in run_linked(len(counts), work) for n in used)
    assert len(used_by) == sum(counts)
    assert min(used_by.values()) >= 2


def test_one_message_per_batch_of_all_but_what_stays() -> None:
    def work(link: tw.Link) -> tuple[int, int]:
        field = torch.zeros(40, 5)
        shuffle = ShuffleRing(field, link=link)
        before = link.stats
        list(shuffle.batches(8))
        agreed = 3  # a name and a text are gathered at the start of an epoch
        return link.stats.rounds - before.rounds - agreed, link.stats.sent_bytes - before.sent_bytes

    for rounds, sent_bytes in run_linked(4, work):
        assert rounds == 5
        assert 30 * 20 <= sent_bytes < 30 * 20 + 1000  # of 40 rows 10 stay; the rest is the agreement


@pytest.mark.parametrize("counts", [WORLDS[0], WORLDS[1], WORLDS[-1]])
def test_resumed_is_as_if_never_stopped(counts: list[int]) -> None:
    def stopped(link: tw.Link) -> tuple[list[int], dict[str, object]]:
        held = Held(link, counts)
        held.go(1, 4)
        held.ring.set_epoch(1)
        used = [held.check(batch) for batch in islice(held.ring.batches(4), 2)]
        return [n for batch in used for n in batch], held.ring.state_dict()

    def undisturbed(link: tw.Link) -> tuple[list[list[int]], list[int]]:
        held = Held(link, counts)
        return held.go(3, 4), held.labels.tolist()

    before = run_linked(len(counts), stopped)

    def resumed(link: tw.Link) -> tuple[list[list[int]], list[int]]:
        held = Held(link, counts)
        held.ring.load_state_dict(before[link.rank][1])
        assert held.ring.epoch == 1
        return held.go(3, 4), held.labels.tolist()

    after = run_linked(len(counts), resumed)
    for rank, (used, labels) in enumerate(run_linked(len(counts), undisturbed)):
        assert before[rank][0] + after[rank][0][0] == used[1]
        assert after[rank][0][1] == used[2]
        assert after[rank][1] == labels


def test_resized_twice_in_an_epoch() -> None:
    def used_of(held: Held) -> list[int]:
        return [n for batch in islice(held.ring.batches(4), 1) for n in held.check(batch)]

    def first(link: tw.Link) -> tuple[list[int], dict[str, object]]:
        held = Held(link, [20, 24, 16])
        return used_of(held), held.ring.state_dict()

    before = run_linked(3, first)

    def second(link: tw.Link) -> tuple[list[int], dict[str, object]]:
        held = Held(link, [30, 30])
        held.ring.resize([state for _, state in before])
        return used_of(held), held.ring.state_dict()

    between = run_linked(2, second)

    def third(link: tw.Link) -> tuple[list[int], list[int]]:
        held = Held(link, [60])
        held.ring.resize([state for _, state in between])
        return held.go(1, 4)[0], held.labels.tolist()

    [(used, labels)] = run_linked(1, third)
    assert sorted(labels) == list(range(60))
    used += [n for some, _ in [*before, *between] for n in some]
    assert sorted(used) == list(range(60))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resumed_by_another_number_of_workers_uses_what_is_left(world_size: int) -> None:
    def stopped(link: tw.Link) -> tuple[list[int], dict[str, object]]:
        held = Held(link, [20, 24, 16])
        held.ring.set_epoch(1)
        used = [n for batch in islice(held.ring.batches(4), 2) for n in held.check(batch)]
        return used, held.ring.state_dict()

    before = run_linked(3, stopped)
    counts = [60 // world_size] * world_size

    def resumed(link: tw.Link) -> tuple[list[int], list[int]]:
        held = Held(link, counts)
        held.ring.resize([state for _, state in before])
        held.check(np.arange(len(held.labels)))
        return held.go(2, 4)[0], held.labels.tolist()

    after = run_linked(world_size, resumed)
    assert Counter(n for _, labels in after for n in labels) == Counter(range(60))
    used = Counter(n for used, _ in [*before, *after] for n in used)
    assert used == Counter(range(60))


def test_an_epoch_that_was_saved_at_its_end_has_no_batches_left() -> None:
    def work(link: tw.Link) -> None:
        held = Held(link, [6, 6])
        held.go(1, 2)
        other = Held(link, [6, 6])
        other.ring.load_state_dict(held.ring.state_dict())
        other.ring.set_epoch(0)
        assert list(other.ring.batches(2)) == []
        with pytest.raises(UsageError, match="epoch 0 is used up\nhint: call set_epoch"):
            list(held.ring.batches(2))

    run_linked(2, work)


def test_a_checkpoint_holds_every_workers_samples(tmp_path: Path) -> None:
    """Saved in the middle of an epoch with samples under way, loaded by two workers more."""

    def work(link: tw.Link) -> list[int]:
        model = link._model
        held = Held(link, [60 // link.world_size] * link.world_size)
        with tw.Checkpoint(
            tmp_path, link=link, model=model, optimizer=link._optimizers[0], ring=held.ring
        ) as checkpoint:
            checkpoint.load()
            used = [n for batch in islice(held.ring.batches(5), 2) for n in held.check(batch)]
            checkpoint.save(link.world_size)
        return used

    first, then = run_linked(2, work), run_linked(4, work)
    assert Counter(n for used in [*first, *then] for n in used) == Counter(range(60))


def test_a_lost_worker_is_told() -> None:
    def work(link: tw.Link) -> None:
        shuffle = ShuffleRing(torch.zeros(60, 2), link=link)
        for number, _ in enumerate(shuffle.batches(1)):
            if (link.rank, number) == (1, 3):
                raise ArithmeticError("the batch was bad")

    seen: list[BaseException] = []

    def watched(link: tw.Link) -> None:
        try:
            work(link)
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises((ArithmeticError, PeerLost)):  # of whoever ends first
        run_linked(3, watched)
    assert {type(error) for error in seen} == {ArithmeticError, PeerLost}
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([], "fields must be one or more, got none"),
        ([torch.zeros(3), torch.zeros(2)], r"one row per sample each, got \[3, 2\] rows"),
        ([torch.zeros(0, 2)], "fields must be of at least one sample"),
        ([torch.tensor(1)], "field 0 must have one row per sample, got a single number"),
        (
            [torch.zeros(2), ["a", "b"]],
            "field 1 must be a tensor or a list of tensors with lengths, got list",
        ),
        ([[torch.zeros(2), torch.zeros(2, 3)]], "field 0 must hold tensors of one dtype, and alike"),
    ],
)
def test_wrong_fields_are_refused(fields: list[Tensor], words: str) -> None:
    def work(link: tw.Link) -> None:
        with pytest.raises(SettingError, match=words):
            ShuffleRing(*fields, link=link)

    run_linked(1, work)


def test_wrong_settings_and_states_are_refused() -> None:
    def work(link: tw.Link) -> None:
        with pytest.raises(SettingError, match="remainder must be one of 'drop', 'uneven', got 'repeat'"):
            ShuffleRing(torch.zeros(4), link=link, remainder="repeat")  # type: ignore[arg-type]
        shuffle = ShuffleRing(torch.zeros(4), link=link)
        with pytest.raises(SettingError, match="batch_size must be at least 1, got 0"):
            next(shuffle.batches(0))
        saved = ShuffleRing(torch.zeros(5), link=link).state_dict()
        with pytest.raises(DataError, match="5 samples were saved, this worker holds 4"):
            shuffle.load_state_dict(saved)
        with pytest.raises(DataError, match="10 samples were saved, these workers hold 4"):
            shuffle.resize([saved, saved])

    run_linked(1, work)


def test_a_ring_ends_with_its_link() -> None:
    def work(lane: Lane) -> None:
        rings: list[ShuffleRing] = []
        with_link(lambda link: rings.append(ShuffleRing(torch.zeros(8), link=link)), lane)
        with pytest.raises(UsageError, match="the link was detached\nhint: do it inside `with attach"):
            next(rings[0].batches(2))

    run_threads(2, work)


def test_workers_that_differ_are_told_apart() -> None:
    def other_kind(link: tw.Link) -> None:
        ShuffleRing(torch.zeros(4, 2 + link.rank // 2), link=link)

    def other_size(link: tw.Link) -> None:
        list(ShuffleRing(torch.zeros(4), link=link).batches(1 + link.rank))

    with pytest.raises(PeerDiffers, match=r"rank 0 has '.*float32 \(2,\)' where rank 2 has '.*\(3,\)'"):
        run_linked(3, other_kind)
    with pytest.raises(PeerDiffers, match=r"'epoch 0 in batches of 1' where rank 1 has .* of 2'"):
        run_linked(2, other_size)


def test_examples_run() -> None:
    failed, tried = doctest.testmod(ring)
    assert tried > 5
    assert failed == 0
