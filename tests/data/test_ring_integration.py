"""The ring over Gloo: real messages, real waiting."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.data.linked import with_link
from tests.worlds import run_processes
from thinwire.data import ShuffleRing

pytestmark = pytest.mark.processes
COUNTS = [40, 41, 47]


def wander() -> tuple[list[list[int]], list[int]]:
    def work(link: tw.Link) -> tuple[list[list[int]], list[int]]:
        start = sum(COUNTS[: link.rank])
        labels = torch.arange(start, start + COUNTS[link.rank])
        images = labels.to(torch.float64).view(-1, 1).repeat(1, 1000)
        texts = [torch.full((int(n) % 50,), int(n), dtype=torch.int16) for n in labels]
        ring = ShuffleRing(images, labels, texts, link=link)
        used = []
        for epoch in range(3):
            ring.set_epoch(epoch)
            used.append(list[int]())
            for batch in ring.batches(7):
                x, y, words = ring.take(batch)
                assert torch.equal(x, y.double().view(-1, 1).repeat(1, 1000))
                assert all(
                    (text == n).all() and len(text) == n % 50 for text, n in zip(words, y, strict=True)
                )
                used[-1] += y.tolist()
        return used, labels.tolist()

    return with_link(work)


def test_samples_wander_between_processes() -> None:
    results = run_processes(3, wander)
    assert Counter(n for _, labels in results for n in labels) == Counter(range(sum(COUNTS)))
    for epoch in range(3):
        seen = Counter(n for used, _ in results for n in used[epoch])
        assert set(seen.values()) == {1}
        assert len(seen) == 3 * min(COUNTS)
    for rank, (_, labels) in enumerate(results):
        start = sum(COUNTS[:rank])
        assert sum(start <= n < start + COUNTS[rank] for n in labels) < 0.6 * COUNTS[rank]
