"""The emulated accelerator: stated seconds, real gradients, last layer first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from thinwire.lab.control import STATUS_VARIABLE, HostStatus
from thinwire.lab.emulate import HIDDEN_GAP_S, MAX_OVERSLEEP_S, EmulatedDevice, EmulatedModel
from thinwire.lab.nets import equal_net, parse_net


class SloppyClock:
    """Time that only sleeping moves, and every sleep takes `late_s` too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.late_s = late_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self.late_s

    def device(self) -> EmulatedDevice:
        return EmulatedDevice(clock=self, sleep=self.sleep)


@pytest.mark.parametrize("late_s", [0.0, 0.00007, 0.004])
def test_oversleeping_is_won_back(late_s: float) -> None:
    clock = SloppyClock(late_s)
    device = clock.device()
    for _ in range(100):
        device.compute(0.003)
    assert clock.now_s == pytest.approx(0.3, abs=late_s + 1e-9)


def test_short_waits_are_saved_up() -> None:
    clock = SloppyClock()
    device = clock.device()
    for _ in range(1000):
        device.compute(0.00001)
    assert clock.now_s + device.owed_s == pytest.approx(0.01)
    assert clock.now_s > 0.009


def test_work_counts_as_part_of_the_time() -> None:
    clock = SloppyClock()
    device = clock.device()
    device.compute(0.5, lambda: clock.sleep(0.4))
    assert clock.now_s == pytest.approx(0.5)


def test_a_long_stop_is_not_won_back() -> None:
    clock = SloppyClock(late_s=5.0)
    device = clock.device()
    device.compute(0.1)
    assert device.owed_s == -MAX_OVERSLEEP_S


def test_waiting_between_layers_is_hardly_won_back() -> None:
    clock = SloppyClock()
    device = clock.device()
    device.compute(0.1)
    clock.sleep(1.0)
    device.compute(0.1)
    assert clock.now_s == pytest.approx(1.2 - HIDDEN_GAP_S)


def test_gradients_are_real_and_come_last_layer_first() -> None:
    clock = SloppyClock()
    model = EmulatedModel(parse_net("resnet20"), device=clock.device())
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    model(torch.ones(4, 3, 2)).mean().backward()
    layers = [name.rsplit(".", 1)[0] for name in seen]
    order = [f"layers.{layer.name.replace('.', '_')}" for layer in reversed(model.net.layers)]
    assert list(dict.fromkeys(layers)) == order
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.abs().sum() > 0
    assert clock.now_s == pytest.approx(model.net.forward_s + model.net.backward_s, abs=0.001)


def test_forward_and_backward_take_their_own_seconds() -> None:
    clock = SloppyClock()
    model = EmulatedModel(
        equal_net(params=100, layers=4, forward_s=1.0, backward_s=2.0), device=clock.device()
    )
    loss = model(torch.ones(2, 1)).mean()
    assert clock.now_s == pytest.approx(1.0)
    loss.backward()
    assert clock.now_s == pytest.approx(3.0)


def test_scaling_the_loss_scales_the_gradients_and_seeds_differ() -> None:
    def gradient(seed: int, factor: float) -> torch.Tensor:
        model = EmulatedModel(parse_net("params=64,forward=0,backward=0"), seed=seed)
        (factor * model(torch.ones(8, 1)).mean()).backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        return parameter.grad

    torch.testing.assert_close(gradient(0, 3.0), 3.0 * gradient(0, 1.0))
    assert not torch.equal(gradient(0, 1.0), gradient(1, 1.0))


def test_gradients_accumulate_and_nothing_else_is_in_the_state() -> None:
    model = EmulatedModel(parse_net("params=64,layers=2,forward=0,backward=0"))
    for _ in range(2):
        model(torch.ones(1, 1)).mean().backward()
    once = EmulatedModel(parse_net("params=64,layers=2,forward=0,backward=0"))
    once(torch.ones(1, 1)).mean().backward()
    for twice, single in zip(model.parameters(), once.parameters(), strict=True):
        assert twice.grad is not None
        assert single.grad is not None
        torch.testing.assert_close(twice.grad, 2 * single.grad)
    assert list(model.buffers()) == []
    assert sum(t.numel() for t in model.state_dict().values()) == 64


def test_a_slow_host_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "status").open("w+b") as file:
        status = HostStatus.create(file.fileno())
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path / "status"))
    clock = SloppyClock()
    model = EmulatedModel(equal_net(params=8, layers=2, forward_s=1.0, backward_s=1.0), device=clock.device())
    status.speed = 0.5
    model(torch.ones(1, 1))
    assert clock.now_s == pytest.approx(2.0)
    status.speed = 1.0
    model(torch.ones(1, 1))
    assert clock.now_s == pytest.approx(3.0)


def test_real_sleeps_keep_books_over_a_whole_step() -> None:
    device = EmulatedDevice()
    model = EmulatedModel(equal_net(params=1000, layers=20, forward_s=0.05, backward_s=0.05), device=device)
    start_s = time.perf_counter()
    model(torch.ones(1, 1)).mean().backward()
    # No upper bound on the time: the machine may be busy. What it took too long must be in the books.
    assert time.perf_counter() - start_s >= 0.1 - device.owed_s - 0.001


def test_instant_steps_take_no_time_and_leave_no_debt() -> None:
    clock = SloppyClock()
    model = EmulatedModel(
        equal_net(params=1000, layers=4, forward_s=1.0, backward_s=2.0), device=clock.device()
    )
    with model.instant():
        model(torch.ones(2, 1)).mean().backward()
    assert clock.now_s == 0
    assert all(p.grad is not None for p in model.parameters())
    model(torch.ones(2, 1)).mean().backward()
    assert clock.now_s == pytest.approx(3.0)
