"""What a training loop does with its model between steps, while parameters are under way."""

from __future__ import annotations

import io
import math
from copy import deepcopy

import pytest
import torch

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, batch, model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.errors import UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_has_what_was_under_way_and_no_hooks(how: str) -> None:
    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        with tw.attach(
            model, optimizer, tw.GossipGraD(), process_group=lane, bucket_bytes=BUCKET_BYTES
        ) as link:
            step_once(model, optimizer, 0, link.rank)
            copy = deepcopy(model) if how == "deepcopy" else _through_a_file(model)
            link.synchronize()
            for own, copied in zip(model.parameters(), copy.parameters(), strict=True):
                assert torch.equal(own, copied)
            assert not any(p._post_accumulate_grad_hooks for p in copy.parameters())

    run_threads(2, work)


def _through_a_file(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, torch.nn.Module)
    return loaded


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        (tw.GossipGraD(), math.sqrt(3)),
        (tw.StochasticGradientPush(), math.sqrt(3)),
        (tw.AllReduce(), 1.0),
        (tw.Silent(), 1.0),
    ],
    ids=repr,
)
def test_own_gradients_are_clipped_to_what_their_mean_needs(strategy: Strategy, times: float) -> None:
    def work(lane: LocalLane) -> float:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            inputs, targets = batch(0, link.rank)
            (model(inputs) - targets).square().mean().backward()
            found = link.clip_grad_norm_(0.01)
            assert found > 0.1
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            return float(torch.nn.utils.get_total_norm(gradients))

    for norm in run_threads(3, work):
        assert norm == pytest.approx(0.01 * times, rel=1e-3)


GOSSIP = [tw.GossipGraD(), tw.StochasticGradientPush()]


@pytest.mark.parametrize("strategy", GOSSIP, ids=repr)
@pytest.mark.parametrize("asked", [False, True], ids=["by detach", "by the user"])
def test_all_workers_leave_with_the_mean_model(strategy: Strategy, asked: bool) -> None:
    def work(lane: LocalLane) -> tuple[torch.Tensor, torch.Tensor, int]:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            for step in range(5):
                step_once(model, optimizer, step, link.rank)
            link.synchronize()
            own = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            with link.averaged():
                pass
            if asked:
                link.average_()
            sent_bytes = link.stats.sent_bytes
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        return own, after, link.stats.sent_bytes - sent_bytes

    own, after, sent = zip(*run_threads(3, work), strict=True)
    assert not torch.equal(own[0], own[1])
    assert all(torch.equal(each, after[0]) for each in after)
    torch.testing.assert_close(after[0], torch.stack(own).mean(0), rtol=1e-12, atol=1e-12)
    assert (min(sent) < after[0].nbytes) == asked  # what all have already is not sent again


@pytest.mark.parametrize("strategy", GOSSIP, ids=repr)
def test_join_is_refused_before_the_loop(strategy: Strategy) -> None:
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, strategy) as link:
        with pytest.raises(UsageError, match="has no join") as caught, link.join():
            raise AssertionError("the loop has begun")
        assert "equal numbers of batches" in caught.value.hint
