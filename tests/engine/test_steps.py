"""Steps of an elastic loop that a loss ends early, with two workers in one process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.wire.tls import in_threads
from thinwire.elastic.keys import write_key
from thinwire.elastic.world import Elastic
from thinwire.engine.link import Link
from thinwire.engine.regroup import Regrouper
from thinwire.errors import PeerLost

NUM_SAMPLES, SOON_S = 24, 30.0
LOST_AT = 3
"""Steps done when the second worker sees a loss, which the first one does not before it has stepped."""


class Scene:
    """Two workers, of which the second sees a loss after backward, when the first one has made the step."""

    def __init__(self, key_file: Path) -> None:
        write_key(key_file)
        self._elastic = Elastic(key_file=str(key_file))
        self._key_file = key_file
        self._address = SimpleQueue[str]()
        self._first_has_stepped = threading.Event()
        self._fails = threading.local()
        """On the thread of a worker: `now`, whether it sees another loss while all regroup."""

    def train(self, rank: int, fails_again: bool) -> tuple[Counter[int], int, int, torch.Tensor]:
        """The samples of steps that are done, how often the code after the optimizer's step was run, how many
        steps there were, and the model."""
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        elastic = self._elastic
        if rank == 1:
            elastic = Elastic(key_file=str(self._key_file), join=[self._address.get(timeout=SOON_S)])
        done, times_after = Counter[int](), 0
        with tw.attach(model, optimizer, tw.AllReduce(), elastic=elastic, silence_s=5.0) as link:
            sampler = link.sampler(NUM_SAMPLES, batch_size=2)
            if rank == 0:
                self._wait_for_second(link)
            for _ in link.epochs(1):
                for step in link.each_step(sampler):
                    with step as batch:
                        model(torch.tensor(batch).double().view(-1, 1)).square().mean().backward()
                        if rank == 1 and link.steps == LOST_AT and link.generation == 2:
                            assert self._first_has_stepped.wait(SOON_S)
                            self._fails.now = fails_again
                            raise PeerLost("somebody is lost")
                        if rank == 0 and link.steps == LOST_AT:
                            self._fails.now = fails_again
                        optimizer.step()
                        times_after += 1
                        if rank == 0 and link.steps > LOST_AT:
                            self._first_has_stepped.set()
                    if step.done:
                        done.update(batch)
            return done, times_after, link.steps, model.weight.detach().clone()

    def _wait_for_second(self, link: Link) -> None:
        self._address.put(link.address)
        deadline = time.monotonic() + SOON_S
        while link.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def fail(self) -> None:
        """Called by each worker while it regroups."""
        if getattr(self._fails, "now", False):
            self._fails.now = False
            raise PeerLost("one more is lost")


def failing(call: Callable[..., Any], fail: Callable[[], None], *, before: bool) -> Callable[..., Any]:
    """A call that fails before or after it is made."""

    def call_and_fail(*args: Any) -> Any:
        if before:
            fail()
        result = call(*args)
        if not before:
            fail()
        return result

    return call_and_fail


@pytest.mark.parametrize(
    ("again", "where"),
    [(None, ""), (1, "before the common place"), (1, "at the common place"), (0, "at the common place")],
)
def test_a_batch_whose_step_another_worker_has_made_is_done(
    again: int | None, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if somebody, `again`, sees another loss while all regroup."""
    scene = Scene(tmp_path / "run.key")
    name = "_deal" if where == "before the common place" else "_commit"
    call = failing(getattr(Regrouper, name), scene.fail, before=name == "_deal")
    monkeypatch.setattr(Regrouper, name, call)
    results = in_threads(lambda rank: scene.train(rank, rank == again), 2)
    (first, times_first, steps, model), (second, times_second, same_steps, same_model) = results
    assert first + second == Counter(range(NUM_SAMPLES))
    assert steps == same_steps == NUM_SAMPLES // 4
    assert (times_first, times_second) == (steps, steps - 1), "its block was ended before that code"
    assert torch.equal(model, same_model)
