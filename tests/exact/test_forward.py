"""AllReduce(overlap="forward"): whatever a loop does between steps, the result is that of plain torch."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import SGD, AdamW, Optimizer

from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, Scenario, alone, batch, in_threads, loss_of, net, seeded, sgd
from tests.exact.test_loops import LOOPS

STEPS = 8  # the order of sending is agreed upon after four


def backward(model: nn.Module, optimizer: Optimizer, place: Place, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, place.part(step)).backward()


def named(prefix: str, values: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def memory(optimizer: Optimizer) -> Arrays:
    """The optimizer's state, read as a user would."""
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{key}": torch.as_tensor(each[key]).numpy().copy() for i, each in state.items() for key in each
    }


def evaluation(place: Place) -> Arrays:
    """In the middle of an epoch, of the whole model or a part of it, with and without inference mode."""
    model = net()
    optimizer, seen = AdamW(model.parameters(), lr=0.01), []
    with place.attach(model, optimizer):
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            if step % 4 == 3:  # before the step: the parameters are still the old ones
                seen.append(loss_of(model.eval(), batch(100)).detach())
            optimizer.step()
            model.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                seen.append(loss_of(model, batch(100 + step)).clone())
                seen.append(model[2](torch.ones(8, dtype=torch.float64)).sum())  # type: ignore[index]
            model.train()
    return arrays(model) | {"seen": torch.stack(seen).numpy()}


def state_dicts(place: Place) -> Arrays:
    """Of the model, of a layer of it, and of the optimizer, after every step."""
    model = net()
    optimizer, seen = AdamW(model.parameters(), lr=0.01), Arrays()
    readers: list[Callable[[], Arrays]] = [
        lambda: arrays(model),
        lambda: arrays(model[2]),  # type: ignore[index]
        lambda: memory(optimizer),
    ]
    with place.attach(model, optimizer):
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            optimizer.step()
            seen |= named(str(step), readers[step % 3]())
    return arrays(model) | seen


def rewinding(place: Place) -> Arrays:
    """Model and optimizer go back to where they were, with a step under way."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for step in range(STEPS):
            if step == 3:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            backward(model, optimizer, place, step)
            optimizer.step()
            if step == 5:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
    return arrays(model)


def copies(place: Place) -> Arrays:
    """A deep copy and a file taken right after a step hold that step; so do their optimizers."""
    model = net()
    optimizer, seen = sgd(model), Arrays()
    with place.attach(model, optimizer):
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            optimizer.step()
            if step % 3 == 0:
                twin = copy.deepcopy(model)
                seen |= named(f"twin {step}", arrays(twin))
            elif step % 3 == 1:
                seen |= named(f"optimizer {step}", memory(copy.deepcopy(optimizer)))
            else:
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                seen |= named(f"file {step}", arrays(torch.load(file, weights_only=False)))
    return arrays(model) | seen


def direct_use(place: Place) -> Arrays:
    """A moving average and a clamp, which take the parameters themselves, after `link.synchronize()`."""
    model = net()
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    with place.attach(model, optimizer) as link:
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            optimizer.step()
            link.synchronize()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    p.clamp_(-0.3, 0.3)
                    mean.lerp_(p, 0.1)
    return arrays(model) | named("average", arrays(average))


def changing_settings(place: Place) -> Arrays:
    """Learning rate, momentum and members change right after the step that they must not change."""
    model = net()
    first, last = model[0], nn.Sequential(model[2], model[4])  # type: ignore[index]
    optimizer = SGD(last.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, place.part(step)).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"].mul_(0.8)
                group["momentum"] *= 0.9
            if step == 3:
                optimizer.add_param_group({"params": [*first.parameters()], "lr": torch.tensor(0.02)})
    return arrays(model)


def clipping(place: Place) -> Arrays:
    """By the link, also twice."""
    model = net()
    optimizer, norms = sgd(model), []
    with place.attach(model, optimizer) as link:
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            norms.append(link.clip_grad_norm_(0.3))
            if step % 2:
                norms.append(link.clip_grad_norm_(0.1))
            optimizer.step()
            link.clip_grad_norm_(0.001)  # too late to change anything
    return arrays(model) | {"norms": torch.stack(norms).numpy()}


def skipping(place: Place) -> Arrays:
    """Some gradients are dropped instead of stepped, and some steps have no gradients."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer) as link:
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            if step % 4 == 1:
                (optimizer if step == 1 else model).zero_grad()
                optimizer.step()
            elif step % 4 == 2:
                link.clip_grad_norm_(0.1)
                continue  # dropped by the zero_grad of the next step
            else:
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.zero_grad()
                optimizer.step()
    return arrays(model)


def several_forwards(place: Place) -> Arrays:
    """Two forwards make one loss; one is made for nothing; one fails."""
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            (loss_of(model, place.part(step)) + loss_of(model, place.part(100 + step))).backward()
            optimizer.step()
            model[0](place.part(step)[0])  # type: ignore[index]
            if step in (0, 4):
                fail = model[2].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[index]
                with pytest.raises(ZeroDivisionError):
                    model(place.part(step)[0])
                fail.remove()
    return arrays(model)


def detaching(place: Place, *, after: str) -> Arrays:
    """In the middle of a step; then plain training goes on with the gradients it finds."""
    model = net()
    optimizer = sgd(model)
    link = place.attach(model, optimizer)
    for step in range(STEPS):
        backward(model, optimizer, place, step)
        if step == STEPS - 1 and after == "backward":
            link.detach()
        optimizer.step()
    link.detach()
    return arrays(model)


class Odd(nn.Module):
    """Tied layers, weights used by other code than their module's, layers used by turns, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.tied, self.twin = nn.Linear(6, 6), nn.Linear(6, 6)
        self.twin.weight = self.tied.weight
        self.inner = nn.Linear(6, 6)
        self.turns = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.twin(self.tied(x * self.scale).tanh())
        x = linear(x, self.inner.weight).tanh() + self.inner(x)
        out: Tensor = self.last(self.turns[self.calls % 2](x))
        return out


def odd_models(place: Place) -> Arrays:
    model = seeded(Odd)
    assert isinstance(model, Odd)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with place.attach(model, optimizer):
        fail = model.tied.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # what comes after it is not seen
            model(place.part(0)[0])
        fail.remove()
        for step in range(STEPS):
            backward(model, optimizer, place, step)
            optimizer.step()
    return arrays(model)


REFUSED = {"accumulation that communicates every time", "gradients kept", "closure", "clipping"}
SCENARIOS: dict[str, Scenario] = {name: loop for name, loop in LOOPS.items() if name not in REFUSED} | {
    "evaluation": evaluation,
    "state dicts": state_dicts,
    "rewinding": rewinding,
    "copies": copies,
    "direct use": direct_use,
    "changing settings": changing_settings,
    "clipping by the link": clipping,
    "skipping": skipping,
    "several forwards": several_forwards,
    "detaching after backward": functools.partial(detaching, after="backward"),
    "detaching after step": functools.partial(detaching, after="step"),
    "odd models": odd_models,
}


@pytest.mark.filterwarnings("ignore:.*are not in the optimizer")
@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_plain_torch(name: str) -> None:
    whole = alone(SCENARIOS[name])
    (one,) = in_threads(1, SCENARIOS[name], "forward")
    two = in_threads(2, SCENARIOS[name], "forward")

    assert same_bits(one, whole) or name == "unequal batches"  # times and by a weight, which rounds
    assert difference(one, whole) < 1e-12
    assert difference(two[0], whole) < 1e-11
    assert same_bits(*two)
