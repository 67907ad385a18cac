"""The seam carries every kind of algorithm: in threads, where order and timing are hardest."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch

from tests.contract import seam, toys
from tests.worlds import run_threads
from thinwire import Bucket, Wire, in_background
from thinwire.errors import UsageError
from thinwire.wire.local import LocalLane


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_in_phases_are_the_same_on_all_workers(world_size: int) -> None:
    assert (
        run_threads(world_size, lambda lane: seam.phases_in_order(lane, world_size, 40)) == [45] * world_size
    )


def check_hierarchical(everyones: list[list[list[float]]]) -> None:
    alone, pairs, _, everybody = zip(*everyones, strict=True)
    assert alone[0] != alone[1]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    assert everybody[0] == everybody[1] == everybody[2] == everybody[3]


def test_a_hierarchical_mean_in_groups() -> None:
    check_hierarchical(run_threads(4, seam.hierarchical_mean))


def check_server(everyones: list[tuple[int, list[int], float]]) -> None:
    served = everyones[0][1]
    assert [sent for sent, _, _ in everyones] == served, "every message is handled, none twice"
    seconds = [took_s for _, _, took_s in everyones]
    assert seconds[2] > 0.5


def test_an_asynchronous_server_loses_no_message() -> None:
    check_server(run_threads(3, seam.parameter_server))


def test_coming_back_is_legal_everywhere() -> None:
    def worker(lane: LocalLane) -> None:
        for place, names in seam.comes_back_everywhere(lane).items():
            assert names == {threading.current_thread().name}, place

    run_threads(2, worker)


def test_coming_back_is_legal_in_a_world_of_one() -> None:
    for place, names in seam.comes_back_everywhere(None).items():
        assert names == {threading.current_thread().name}, place


def test_writing_parameters_beside_training_is_refused() -> None:
    class Careless(toys.ComesBack):
        async def mix(self, bucket: Bucket, state: object, wire: Wire) -> None:
            await in_background()
            bucket.add_(torch.zeros_like(bucket.read()))

    model, optimizer = seam.small_model()
    link = seam.attach(model, optimizer, Careless(), None)
    seam.step(model, optimizer)
    with pytest.raises(UsageError, match="outside the training thread"):
        seam.step(model, optimizer)
    with pytest.raises(UsageError):
        link.detach()


@pytest.mark.parametrize("toy", [toys.Phases, toys.HierarchicalMean, toys.ParameterServer, toys.ComesBack])
def test_toys_are_short(toy: type) -> None:
    assert len(inspect.getsource(toy).splitlines()) <= 40
