"""Elastic worlds of real processes: whoever dies, freezes, raises or joins, training goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.elastic.worlds import NUM_SAMPLES, Fault, Job, Story, Workers, count_samples, make_key
from tests.worlds import run_processes
from thinwire.strategies.base import Strategy
from thinwire.wire.tls.files import make

pytestmark = pytest.mark.processes
STRATEGIES = [
    tw.AllReduce(),
    tw.GossipGraD(),
    *(
        pytest.param(strategy, marks=pytest.mark.slow)
        for strategy in (tw.TopK(density=0.25), tw.SASGD(interval=4), tw.StochasticGradientPush())
    ),
]


def start_twice() -> list[float]:
    """Two worlds one after another, with one store; the first worker is late for the second."""
    sizes = []
    for number in range(2):
        time.sleep(0.5 if number and dist.get_rank() == 0 else 0.0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.AllReduce(), elastic=True) as link:
            sizes += link.all_reduce([1.0])
    return sizes


def test_one_store_starts_several_worlds() -> None:
    assert run_processes(2, start_twice) == [[2.0, 2.0], [2.0, 2.0]]


def name_of(strategy: Strategy) -> str:
    return type(strategy).__name__


def check_samples(stories: list[Story], num_epochs: int, *, lost: int = 0) -> None:
    """Nobody has seen a sample twice in an epoch, and none is missing but for those `lost` workers saw."""
    counted = count_samples(stories)
    assert set(counted.values()) == {1}
    assert num_epochs * NUM_SAMPLES - lost <= len(counted) <= num_epochs * NUM_SAMPLES


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_the_first_worker_dies_and_the_others_go_on_at_once(strategy: Strategy) -> None:
    with Workers(3, Job(strategy=strategy)) as workers:
        workers.wait_for(2, "step", 6)
        workers.signal(0, signal.SIGKILL)
        stories = workers.stories([1, 2])
    assert {story.generation for story in stories} == {2}
    assert {story.world_size for story in stories} == {2}
    assert len({story.digest for story in stories}) == 1
    check_samples(stories, 2, lost=20 * 5)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("kill", "backward"),
        ("raise", "forward"),
        pytest.param("kill", "forward", marks=pytest.mark.slow),
        pytest.param("raise", "backward", marks=pytest.mark.slow),
    ],
)
def test_wherever_in_a_step_it_happens(kind: str, where: str) -> None:
    with Workers(3, Job(), {1: Fault(kind, step=7, where=where)}) as workers:
        stories = workers.stories([0, 2])
    assert len({story.digest for story in stories}) == 1
    assert len({story.steps for story in stories}) == 1
    # the step in which it died counts if a worker that is left had its gradients: then it counts for all
    check_samples(stories, 2, lost=8 * 5)
    assert len(count_samples(stories)) in (2 * NUM_SAMPLES - 7 * 5, 2 * NUM_SAMPLES - 8 * 5)


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=name_of)
def test_one_that_sees_a_loss_when_others_have_made_the_step_has_its_batch_counted_once(
    strategy: Strategy,
) -> None:
    """Before, where replicas agree, its batch was not dealt again, and said not to have been trained on."""
    with Workers(3, Job(strategy=strategy), {1: Fault("lose", step=7, seconds=1.0)}) as workers:
        stories = workers.stories([0, 1, 2])
    assert {story.generation for story in stories} == {2}
    assert len({story.digest for story in stories}) == 1
    check_samples(stories, 2)


@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.SASGD(interval=5)], ids=name_of)
def test_one_that_waits_at_the_end_of_an_epoch_gets_what_a_lost_one_leaves(strategy: Strategy) -> None:
    """While the third is still in its last step."""
    last = NUM_SAMPLES // (3 * 5) - 1
    faults = {
        1: Fault("kill", step=last, where="forward", seconds=1.0),
        2: Fault("none", step=last, where="forward", seconds=2.5),
    }
    with Workers(3, Job(strategy=strategy), faults) as workers:
        stories = workers.stories([0, 2])
    assert len({story.digest for story in stories}) == 1
    assert len({story.steps for story in stories}) == 1
    check_samples(stories, 2, lost=last * 5)


def test_all_but_one_die_one_after_another() -> None:
    faults = {rank: Fault("kill", step=4 + 2 * rank) for rank in range(3)}
    with Workers(4, Job(num_epochs=1), faults) as workers:
        [story] = workers.stories([3])
    assert story.world_size == 1
    check_samples([story], 1, lost=NUM_SAMPLES // 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=name_of)
def test_a_frozen_worker_is_left_out_and_comes_back(strategy: Strategy) -> None:
    with Workers(3, Job(strategy=strategy, num_epochs=12)) as workers:
        workers.wait_for(0, "step", 5)
        workers.signal(1, signal.SIGSTOP)
        while workers.wait_for(0, "step", workers.said[0][-1][1] + 1)[2] == 1:
            pass
        workers.signal(1, signal.SIGCONT)
        stories = workers.stories([0, 1, 2])
    assert {story.generation for story in stories} == {3}
    assert {story.world_size for story in stories} == {3}
    assert len({story.digest for story in stories}) == 1
    counted = count_samples(stories)
    # of its last step, the frozen one may have sent its gradient and not known that the others used it
    assert 12 * NUM_SAMPLES - 5 <= len(counted) <= 12 * NUM_SAMPLES
    if strategy.replicas_agree:
        assert set(counted.values()) == {1}
    else:  # what went with the model of the frozen one is done again by others
        assert count_samples([stories[0], stories[2]]).most_common(1)[0][1] == 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_a_new_worker_joins_and_the_first_may_die_then(strategy: Strategy, tmp_path: Path) -> None:
    with Workers(2, Job(strategy=strategy, num_epochs=8, key_file=make_key(tmp_path))) as workers:
        workers.wait_for(1, "step", 3)
        new = workers.join(contact=1)
        workers.wait_for(new, "step", 1)
        workers.signal(0, signal.SIGKILL)
        stories = workers.stories([1, new])
    assert {story.generation for story in stories} == {3}
    assert {story.world_size for story in stories} == {2}
    assert len({story.digest for story in stories}) == 1
    assert len({story.steps for story in stories}) == 1
    check_samples(stories, 8, lost=8 * NUM_SAMPLES)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
def test_who_joins_while_the_others_are_in_a_call_helps_them(strategy: Strategy, tmp_path: Path) -> None:
    """Its program is at the first step then; before, workers were said to differ, and all of them ended."""
    job = Job(strategy=strategy, num_epochs=3, batch_size=20, key_file=make_key(tmp_path), call_s=3.0)
    with Workers(2, job) as workers:
        workers.wait_for(1, "call")
        new = workers.join(contact=1)
        stories = workers.stories([0, 1, new])
    assert {story.world_size for story in stories} == {3}
    assert len({story.digest for story in stories}) == 1
    check_samples(stories, 3)
    assert stories[0].sums == stories[1].sums
    assert stories[0].sums[:2] == [[2.0, 0.0], [2.0]], "the new one adds nothing to a call it was not in"
    assert stories[0].sums[-2:] == [[3.0, 6.0], [3.0]]


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=name_of)
def test_a_death_in_a_call_leaves_all_with_one_result(strategy: Strategy) -> None:
    job = Job(strategy=strategy, num_epochs=2, batch_size=20, call_s=0.3)
    with Workers(3, job, {1: Fault("kill", step=0, where="call")}) as workers:
        stories = workers.stories([0, 2])
    assert stories[0].sums == stories[1].sums == [[2.0, 0.0], [2.0], [2.0, 2.0], [2.0]]
    assert len({story.digest for story in stories}) == 1


def test_over_tls_they_die_and_join_and_another_certificate_stays_out(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    make(tmp_path / "run.pem", days=1)
    make(tmp_path / "other.pem", days=1)
    with Workers(3, Job(num_epochs=20, key_file=key, wire="tls")) as workers:
        workers.wait_for(2, "step", 3)
        wrong = workers.join(contact=1, THINWIRE_TLS_FILE=str(tmp_path / "other.pem"))
        assert "do not accept each other's certificate" in workers.wait_for(wrong, "error")[1]
        workers.signal(0, signal.SIGKILL)
        new = workers.join(contact=1)
        workers.wait_for(new, "step", 1)
        stories = workers.stories([1, 2, new])
    assert {story.world_size for story in stories} == {3}
    assert len({story.digest for story in stories}) == 1
    assert len({story.steps for story in stories}) == 1
    assert set(count_samples(stories).values()) == {1}


def test_batches_of_all_workers_together_keep_the_trajectory() -> None:
    """With fixed="global", exact SGD does not notice how many workers there are."""
    stories = []
    for faults in ({}, {1: Fault("kill", step=9, where="forward")}):
        job = Job(num_epochs=1, batch_size=12, fixed="global", step_s=0.01)
        with Workers(3, job, faults) as workers:
            stories.append(workers.stories([0, 2])[0])
    assert stories[0].steps == stories[1].steps == NUM_SAMPLES // 12


def test_who_would_be_one_too_many_for_a_batch_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """Before, every worker ended: none can have less than one sample of a batch of all together."""
    job = Job(num_epochs=2, batch_size=2, fixed="global", step_s=0.05, key_file=make_key(tmp_path))
    with Workers(2, job) as workers:
        workers.wait_for(1, "step", 3)
        new = workers.join(contact=1)
        assert "batches of 2 samples for all workers together" in workers.wait_for(new, "error")[1]
        stories = workers.stories([0, 1])
    assert {story.world_size for story in stories} == {2}
    assert len({story.digest for story in stories}) == 1
    check_samples(stories, 2)
