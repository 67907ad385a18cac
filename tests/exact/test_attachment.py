"""What attach leaves alone: the model, the optimizer, their state dicts, copies of them, and their hooks."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, alone, in_threads, loss_of, net, sgd
from tests.worlds import run_threads
from thinwire.errors import PeerDiffers, SettingError, ThinwireError
from thinwire.strategies.base import Overlap, Strategy
from thinwire.wire.local import LocalLane

OVERLAPS: tuple[Overlap, ...] = ("forward", "backward")
STRATEGIES: list[Strategy] = [
    tw.AllReduce(),
    tw.AllReduce(overlap="forward"),
    tw.AllReduce(overlap="none"),
    tw.Silent(),
]


def step_once(model: nn.Module, optimizer: Optimizer, place: Place, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, place.part(step)).backward()
    optimizer.step()


def hooks(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Everything somebody has hung on the model or the optimizer, or put before their methods."""
    found = [n for each in (*model.modules(), optimizer) for n in vars(each) if hasattr(type(each), n)]
    for module in model.modules():
        found += [v for name, each in vars(module).items() if name.endswith("_hooks") for v in each.values()]
    for p in model.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found += (getattr(p, kind) or {}).values()
    found += [v for name, each in vars(optimizer).items() if name.endswith("_hooks") for v in each.values()]
    return found


def structure(state: Any) -> Any:
    """A state dict with its keys and shapes, and without its numbers."""
    if isinstance(state, torch.Tensor):
        return tuple(state.shape), state.dtype
    if isinstance(state, dict):
        return {key: structure(value) for key, value in state.items()}
    return [structure(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_state_dicts_are_those_of_plain_torch(strategy: Strategy) -> None:
    plain = net()
    plain_optimizer = Adam(plain.parameters(), lr=0.01)
    step_once(plain, plain_optimizer, Place("alone"), 0)

    def attached(place: Place) -> Arrays:
        model = net()
        optimizer = Adam(model.parameters(), lr=0.01)
        identities = [(id(p), p.data_ptr()) for p in model.parameters()]
        with place.attach(model, optimizer, strategy=strategy):
            step_once(model, optimizer, place, 0)
            assert [(id(p), p.data_ptr()) for p in model.parameters()] == identities
            assert structure(model.state_dict()) == structure(plain.state_dict())
            assert structure(optimizer.state_dict()) == structure(plain_optimizer.state_dict())
        assert structure(optimizer.state_dict()) == structure(plain_optimizer.state_dict())
        return {}

    in_threads(2, attached)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_hooks_are_gone_after_detach_and_attaching_again_works(strategy: Strategy) -> None:
    def attached_twice(place: Place) -> Arrays:
        model = net(seed=place.rank)
        optimizer = sgd(model)
        for step in (0, 1):
            link = place.attach(model, optimizer, strategy=strategy)
            assert isinstance(link, tw.Link)
            assert hooks(model, optimizer)
            step_once(model, optimizer, place, step)
            link.detach()
            assert hooks(model, optimizer) == []
        return arrays(model)

    everyone = in_threads(2, attached_twice)
    assert same_bits(*everyone) == strategy.replicas_agree


def test_detached_workers_go_their_own_way() -> None:
    def detached(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer):
            step_once(model, optimizer, place, 0)
        step_once(model, optimizer, place, 1)
        return arrays(model)

    assert not same_bits(*in_threads(2, detached))


def test_hooks_are_gone_after_an_error() -> None:
    model = net()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="out of luck"), tw.attach(model, optimizer, tw.AllReduce()):
        raise RuntimeError("out of luck")
    assert hooks(model, optimizer) == []


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_copies_and_files_of_an_attached_model_are_plain(overlap: Overlap) -> None:
    def copied(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer) as link:
            assert isinstance(link, tw.Link)
            step_once(model, optimizer, place, 0)
            twin, twin_optimizer = copy.deepcopy((model, optimizer))
            file = io.BytesIO()
            torch.save({"model": model, "optimizer": optimizer}, file)
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            rounds = link.stats.rounds
            for other, other_optimizer in ((twin, twin_optimizer), (saved["model"], saved["optimizer"])):
                assert hooks(other, other_optimizer) == []
                assert same_bits(arrays(other), arrays(model))
                step_once(other, other_optimizer, place, 1)
            assert link.stats.rounds == rounds
            step_once(model, optimizer, place, 1)
        return arrays(model)

    everyone = in_threads(2, copied, overlap)
    assert same_bits(*everyone)


def test_a_copy_can_be_attached_beside_its_original() -> None:
    """As in mean teachers and self-distillation."""

    def both(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer, lane="model"):
            twin = copy.deepcopy(model)
            twin_optimizer = sgd(twin)
            with place.attach(twin, twin_optimizer, lane="twin"):
                for step in range(3):
                    step_once(model, optimizer, place, step)
                    step_once(twin, twin_optimizer, place, step)
        assert same_bits(arrays(model), arrays(twin))
        return arrays(model)

    def plain(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        for step in range(3):
            step_once(model, optimizer, place, step)
        return arrays(model)

    assert difference(in_threads(2, both)[1], alone(plain)) < 1e-12


def different_models(odd: nn.Module, world_size: int, odd_rank: int) -> list[ThinwireError]:
    """The error every worker gets when one of them brings another model."""

    def attach(lane: LocalLane) -> ThinwireError:
        model = odd if lane.rank == odd_rank else net()
        with pytest.raises(PeerDiffers) as caught:
            tw.attach(model, sgd(model), tw.AllReduce(), process_group=lane)
        assert hooks(model, sgd(model)) == []
        return caught.value

    return run_threads(world_size, attach)


def wider() -> nn.Module:
    model = net()
    model[2] = nn.Linear(8, 9).double()  # type: ignore[operator]  # nn.Sequential
    return model


def longer() -> nn.Module:
    return nn.Sequential(*net().children(), nn.Linear(1, 1).double())


def mixed() -> nn.Module:
    model = net()
    model[2].float()  # type: ignore[index]
    return model


def partly_frozen() -> nn.Module:
    model = net()
    model[2].weight.requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (wider, ["2.weight", "(8, 8)", "(9, 8)"]),
        (longer, ["5.weight"]),
        (mixed, ["2.weight", "float64", "float32"]),
        (partly_frozen, ["2.weight", "frozen"]),
    ],
)
def test_another_model_is_named_on_all_workers(odd: Any, words: Sequence[str]) -> None:
    for error in different_models(odd(), world_size=3, odd_rank=2):
        assert isinstance(error, PeerDiffers)
        assert error.rank == 2
        assert all(word in str(error) for word in ["rank 2", *words])


def test_a_parameter_only_the_optimizer_knows_is_refused() -> None:
    model = net()
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(SettingError, match=r"1 parameter\(s\) that are not in the model"):
        tw.attach(model, sgd(nn.ParameterList([*model.parameters(), stranger])), tw.AllReduce())


def test_gradients_are_final_when_backward_returns() -> None:
    def gradients(place: Place) -> Arrays:
        model = net()
        with place.attach(model, sgd(model)):
            loss_of(model, place.part(0)).backward()
            return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}

    whole = alone(gradients)
    for ours in in_threads(3, gradients):
        assert difference(ours, whole) < 1e-12
