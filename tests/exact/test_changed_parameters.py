"""Parameters that are converted, reshaped or replaced under the link are named at the next step."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contract.table import BY_THE_CLOCK, STRATEGIES
from tests.exact.compare import Arrays, arrays, same_bits
from tests.exact.place import BUCKET_BYTES, Place, in_threads, loss_of, net, sgd
from tests.worlds import run_processes, run_threads
from thinwire.engine.bucket_plan import make_buckets
from thinwire.engine.parameter_watch import ParameterWatch
from thinwire.errors import PeerLost, ThinwireError, UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES + BY_THE_CLOCK, ids=repr)
Change = Callable[[nn.Module], None]


def convert(model: nn.Module) -> None:
    model.to(torch.float32)


def replace_parameter(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))  # type: ignore[index]


def replace_module(model: nn.Module) -> None:
    model[2] = nn.Linear(8, 8).double()  # type: ignore[operator]


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, place: Place, step: int) -> None:
    dtype = model[0].weight.dtype  # type: ignore[index]
    x, y = place.part(step)
    optimizer.zero_grad()
    loss_of(model, (x.to(dtype), y.to(dtype))).backward()
    optimizer.step()


def refused(lane: LocalLane, strategy: Strategy, change: Change, ranks: tuple[int, ...]) -> ThinwireError:
    """The error of a worker, where those of `ranks` change their model after two steps."""

    def train() -> None:
        model = net()
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES):
            for step in range(1000):
                if step == 2 and lane.rank in ranks:
                    change(model)
                step_once(model, optimizer, Place(lane), step)
                assert step < 3 or lane.rank not in ranks, "nobody noticed"

    with pytest.raises(ThinwireError) as caught:
        train()
    return caught.value


@every_strategy
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (convert, r"has become .* torch.float32 on cpu; it was .* torch.float64 on cpu at attach"),
        (replace_parameter, r"2\.bias of the model was replaced after attach"),
        (replace_module, r"2.* of the model was replaced after attach"),
    ],
)
def test_a_change_is_refused_on_all_workers(strategy: Strategy, change: Change, message: str) -> None:
    errors = run_threads(2, lambda lane: refused(lane, strategy, change, (0, 1)))
    # whoever comes second may have heard of the first one's error by then
    assert any(isinstance(error, UsageError) and "attach" in error.hint for error in errors)
    assert all(isinstance(error, UsageError | PeerLost) for error in errors)
    assert all(re.search(message, str(error)) for error in errors)


@every_strategy
def test_one_worker_that_converts_its_model_is_named_by_all(strategy: Strategy) -> None:
    one, other = run_threads(2, lambda lane: refused(lane, strategy, convert, (1,)))
    assert isinstance(other, UsageError)
    assert isinstance(one, PeerLost)
    assert one.rank == 1
    assert "has become" in str(one)


def test_another_shape_at_the_same_place_is_refused() -> None:
    model = net()
    watch = ParameterWatch(model, make_buckets(list(model.named_parameters()), BUCKET_BYTES), ())
    watch.check_kind()
    bias = model[2].bias  # type: ignore[index]
    bias.data = bias.data[:4]
    with pytest.raises(UsageError, match=r"2\.bias has become \(4,\) torch.float64 on cpu; it was \(8,\)"):
        watch.check_kind()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_new_numbers_of_the_same_kind_are_fine(strategy: Strategy) -> None:
    def train(place: Place, *, swaps: bool) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer, strategy=strategy) as link:
            for step in range(5):
                step_once(model, optimizer, place, step)
                link.synchronize()
                for p in model.parameters() if swaps else ():
                    p.data = p.data.clone()
        return arrays(model)

    swapped = in_threads(2, lambda place: train(place, swaps=True))
    kept = in_threads(2, lambda place: train(place, swaps=False))
    assert all(same_bits(a, b) for a, b in zip(swapped, kept, strict=True))


def converted(strategy: Strategy) -> str:
    model, place = net(), Place("process")
    optimizer = sgd(model)

    def train() -> None:
        with tw.attach(model, optimizer, strategy, timeout_s=60):
            step_once(model, optimizer, place, 0)
            model.to(torch.bfloat16)
            step_once(model, optimizer, place, 1)

    with pytest.raises((UsageError, PeerLost)) as caught:  # or learns it from the other worker
        train()
    return caught.value.message


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [tw.AllReduce(), tw.GossipGraD()], ids=repr)
def test_processes_raise_and_do_not_abort(strategy: Strategy) -> None:
    for message in run_processes(2, converted, strategy):
        assert "torch.bfloat16" in message
