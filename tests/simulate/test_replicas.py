"""Replicas: batched or one after another, the same gradients; buffers and random numbers of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from thinwire.simulate.mapped import Carried, Model
from thinwire.simulate.replicas import Replicas


def loss(model: Model, inputs: Tensor, targets: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    return nn.functional.cross_entropy(model(inputs), targets), None


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])


def learnt(replicas: Replicas, asked: list[int]) -> list[Tensor]:
    """Gradients, buffers and losses of all replicas after some of them have learnt twice."""
    for turn in range(2):
        for index in asked:
            replicas.ask(index, *batch(10 * turn + index))
        for index in reversed(asked):
            replicas.learn(index)
    found = [p.grad for i in asked for p in replicas.model(i).parameters() if p.grad is not None]
    buffers = [b.double() for i in range(len(replicas._slots)) for b in replicas.model(i).buffers()]
    return [*found, *buffers, torch.tensor([replicas.loss(i) for i in asked])]


@pytest.mark.parametrize("asked", [[0, 1, 2, 3], [1, 2], [0, 3, 1]])
def test_batched_is_one_after_another(asked: list[int]) -> None:
    torch.manual_seed(0)
    model = normed()
    alone, together = (learnt(Replicas(model, loss, [5, 6, 7, 8], batched=b), asked) for b in (False, True))
    assert len(alone) == len(together) == len(asked) * 6 + 4 * 3 + 1
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


def test_replicas_draw_different_random_numbers_and_leave_the_global_ones_alone() -> None:
    replicas = Replicas(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3).double()), loss, [1, 2], batched=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for index in (0, 1):
        replicas.ask(index, *batch(0))
    replicas.learn(0)
    assert replicas.loss(0) != replicas.loss(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_batched_is_computed_one_after_another() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 3, batch_first=True)

        def forward(self, x: Tensor, state: Carried = None) -> tuple[Tensor, tuple[Tensor, ...]]:
            outputs, after = self.lstm(x.unsqueeze(1), state)
            return outputs.squeeze(1), tuple(part.detach() for part in after)

    def carrying(model: Model, x: Tensor, y: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        outputs, after = model(x, carried)
        return nn.functional.cross_entropy(outputs, y), after

    model = Recurrent().double()
    alone, together = (Replicas(model, carrying, [5, 6, 7], batched=b) for b in (False, True))
    for a, b in zip(learnt(alone, [0, 1, 2]), learnt(together, [0, 1, 2]), strict=True):
        assert torch.equal(a, b)
    assert not together.batched


@pytest.mark.parametrize("slow_together", [False, True])
def test_what_is_faster_is_found_out(slow_together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Timed(nn.Module):
        """Takes a second whenever it is called, or only when it is called for many."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = normed()

        def forward(self, x: Tensor) -> Tensor:
            nonlocal now_s
            if torch._C._functorch.is_batchedtensor(x) or not slow_together:
                now_s += 1.0
            outputs: Tensor = self.layers(x)
            return outputs

    monkeypatch.setattr("thinwire.simulate.replicas.time", SimpleNamespace(perf_counter=lambda: now_s))
    torch.manual_seed(0)
    model = Timed()
    found, plain = (Replicas(model, loss, [5, 6, 7, 8], batched=b) for b in (None, False))
    for a, b in zip(learnt(found, [0, 1, 2, 3]), learnt(plain, [0, 1, 2, 3]), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
    assert found.batched is not slow_together


def test_parameters_that_forward_does_not_use_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    model.register_parameter("spare", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    replicas = Replicas(model, loss, [0, 1], batched=True)
    learnt(replicas, [0, 1])
    assert [p.grad is None for p in replicas.model(1).parameters()] == [True, False, False]


def test_mean_copy_and_distance() -> None:
    replicas = Replicas(nn.Linear(2, 1, bias=False).double(), loss, [0, 1, 2], batched=False)
    for index, value in enumerate([1.0, 3.0, 8.0]):
        nn.init.constant_(replicas.model(index).weight, value)  # type: ignore[arg-type]
    assert replicas.distance([0, 1]) == pytest.approx(0.5)
    mean = replicas.mean([0, 1])
    assert mean.weight.tolist() == [[2.0, 2.0]]  # type: ignore[operator]
    replicas.copy_(2, mean)
    assert replicas.distance([0, 1, 2]) == pytest.approx((2 / 3) ** 0.5 / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_recorded_and_still_one_after_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().cuda()
    alone, together = (Replicas(model, loss, [5, 6, 7, 8], batched=b) for b in (False, True))
    for turn in range(5):
        for replicas in (alone, together):
            for index in range(4):
                inputs, targets = batch(10 * turn + index)
                replicas.ask(index, inputs.cuda(), targets.cuda())
            replicas.learn(0)
            for index in range(4):
                for parameter in replicas.model(index).parameters():
                    assert parameter.grad is not None
                    parameter.data -= 0.1 * parameter.grad
    assert len(together._mapped._recordings) == 1
    for index in range(4):
        assert together.loss(index) == pytest.approx(alone.loss(index), rel=1e-12)
        for name, b in together.model(index).state_dict().items():
            torch.testing.assert_close(b, alone.model(index).state_dict()[name], rtol=1e-10, atol=1e-12)
