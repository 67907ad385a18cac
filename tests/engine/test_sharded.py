"""attach(..., sharded=True): exact, with an optimizer of 1 / P of the memory, in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from tests.parallel.nets import BATCH, CASES, OPTIMIZERS, train
from tests.worlds import run_threads
from thinwire.wire.local import LocalLane

MLP = CASES["mlp"]
STEPS = 12


def rows(lane: LocalLane) -> slice:
    share = BATCH // lane.world_size
    return slice(lane.rank * share, (lane.rank + 1) * share)


def state_numel(optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor) and t.dim())


def alone(make: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
    model = MLP.model()
    optimizer = make(model)
    train(model, optimizer, MLP, range(STEPS))
    return model, optimizer


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


@pytest.mark.parametrize("bucket_bytes", [None, 800])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_exact(workers: int, optimizer: str, bucket_bytes: int | None) -> None:
    make = OPTIMIZERS[optimizer]
    model_alone, optimizer_alone = alone(make)

    def work(lane: LocalLane) -> tuple[nn.Module, Optimizer, int, int]:
        model = MLP.model()
        mine = make(model)
        with tw.attach(
            model, mine, tw.AllReduce(), process_group=lane, sharded=True, bucket_bytes=bucket_bytes
        ) as link:
            train(model, mine, MLP, range(STEPS), rows(lane))
            link.synchronize()
            return model, mine, state_numel(mine), link.stats.sent_bytes

    results = run_threads(workers, work)
    whole = state_numel(optimizer_alone)
    num_buckets = 1 if bucket_bytes is None else 14
    assert sum(numel for _, _, numel, _ in results) == whole
    for model, mine, numel, sent_bytes in results:
        assert distance(model, model_alone) < 1e-13
        assert numel <= -(-whole // workers) + 2 * num_buckets
        # in the end the optimizer is the user's own again
        for parameter, other in zip(model.parameters(), model_alone.parameters(), strict=True):
            for key, value in optimizer_alone.state[other].items():
                assert torch.allclose(mine.state[parameter][key], value, rtol=1e-12)
        ring = 2 * (workers - 1) / workers * 8 * sum(p.numel() for p in model.parameters())
        assert sent_bytes <= STEPS * (ring + 8 * workers * (14 + 3 * num_buckets))


def test_accumulation_weights_and_dropped_gradients() -> None:
    def work(lane: LocalLane, sharded: bool) -> nn.Module:
        model = MLP.model()
        optimizer = OPTIMIZERS["adamw"](model)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, sharded=sharded) as link:
            for number in range(4):
                x, y = MLP.batch(number)
                optimizer.zero_grad()
                with link.no_sync():
                    nn.functional.cross_entropy(model(x[rows(lane)]), y[rows(lane)]).backward()
                link.weight(1 + lane.rank)
                nn.functional.cross_entropy(model(x[rows(lane)]), y[rows(lane)]).backward()
                if number != 1:  # that one is dropped
                    optimizer.step()
            optimizer.step()  # once more with the last gradients, as torch does
        return model

    plain = run_threads(2, lambda lane: work(lane, False))
    for model, other in zip(run_threads(2, lambda lane: work(lane, True)), plain, strict=True):
        assert distance(model, other) < 1e-13


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(norm_type: float) -> None:
    def work(lane: LocalLane, sharded: bool) -> tuple[nn.Module, list[float]]:
        model, norms = MLP.model(), []
        optimizer = OPTIMIZERS["sgd"](model)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, sharded=sharded) as link:
            for number in range(4):
                x, y = MLP.batch(number)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows(lane)]), y[rows(lane)]).backward()
                norms.append(float(link.clip_grad_norm_(0.05, norm_type)))
                optimizer.step()
        return model, norms

    plain = run_threads(3, lambda lane: work(lane, False))
    for (model, norms), (other, others) in zip(
        run_threads(3, lambda lane: work(lane, True)), plain, strict=True
    ):
        assert distance(model, other) < 1e-9  # the norm is a sum in another order
        assert norms == pytest.approx(others, rel=1e-12)


def test_gradients_that_are_not_finite_are_left_out_or_refused() -> None:
    def work(lane: LocalLane) -> tuple[nn.Module, float]:
        model = MLP.model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, sharded=True):
            for number in range(3):
                x, y = MLP.batch(number)
                optimizer.zero_grad()
                x = x.float()[rows(lane)] * (float("inf") if (number, lane.rank) == (1, 0) else 1)
                scaler.scale(nn.functional.cross_entropy(model(x), y[rows(lane)])).backward()
                scaler.step(optimizer)
                scaler.update()
        return model, scaler.get_scale()

    (one, scale), (other, other_scale) = run_threads(2, work)
    assert scale == other_scale == 2.0**3  # halved once, on both
    assert distance(one, other) == 0
    assert all(p.isfinite().all() for p in one.parameters())


class OnePass(torch.optim.SGD):
    """A subclass of a user, who may do anything."""


def test_what_is_refused_by_name() -> None:
    model = MLP.model()
    attach, sgd = tw.attach, torch.optim.SGD(model.parameters(), lr=0.1)
    refused = tw.errors.UsageError
    for optimizer in (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.Adafactor(model.parameters()),
        OnePass(model.parameters()),
    ):
        with pytest.raises(refused, match=f"parts of parameters, which {type(optimizer).__name__} may not"):
            attach(model, optimizer, tw.AllReduce(), sharded=True)
    for strategy in (tw.GTopK(), tw.AllReduce(overlap="forward"), tw.Silent()):
        with pytest.raises(
            tw.errors.SettingError, match=rf"sharded=True needs AllReduce.*{type(strategy).__name__}"
        ):
            attach(model, sgd, strategy, sharded=True)
    sparse = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(tw.errors.SettingError, match="cannot cut sparse gradients, as weight has"):
        attach(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1), tw.AllReduce(), sharded=True)
    with pytest.raises(tw.errors.SettingError, match=r"sharded must be False where the network shrinks"):
        attach(model, sgd, tw.AllReduce(), sharded=True, apoptosis=tw.Apoptosis())
    with attach(model, sgd, tw.AllReduce(), sharded=True) as link:
        x, y = MLP.batch(0)
        with pytest.raises(refused, match="no join"), link.join():
            pass
        with pytest.raises(refused, match="no reshape"):
            link.reshape({})
        with pytest.raises(refused, match="cannot step with a closure"):
            sgd.step(lambda: 0.0)
        with pytest.raises(refused, match="keeps no gradients"):
            sgd.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(refused, match=r"gradients of its strip only.*\n.*link.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(refused, match="a second backward before"):
            nn.functional.cross_entropy(model(x), y).backward()


def test_another_number_of_workers_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """3 workers with strips, then 2 with strips, then one without strips: as one alone."""
    reference, _ = alone(OPTIMIZERS["adamw"])

    def work(lane: LocalLane, until: int) -> nn.Module:
        model = MLP.model()
        optimizer = OPTIMIZERS["adamw"](model)
        with (
            tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, sharded=True) as link,
            tw.Checkpoint(tmp_path, link=link, model=model, optimizer=optimizer) as checkpoint,
        ):
            found = checkpoint.load()
            train(model, optimizer, MLP, range(found.step if found else 0, until), rows(lane))
            checkpoint.save(until)
        return model

    models = []
    for workers, until in ((3, 5), (2, 8), (1, STEPS)):
        models = run_threads(workers, lambda lane, until=until: work(lane, until))  # type: ignore[misc]  # mypy: default
    assert distance(models[0], reference) < 1e-13
    plain = MLP.model()
    plain.load_state_dict(tw.Checkpoint.read_model(tmp_path))
    assert distance(plain, reference) < 1e-13
