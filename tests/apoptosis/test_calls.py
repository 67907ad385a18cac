"""Calls of a model, kept and made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.apoptosis.calls import JOINED_CALLS, Call, can_be_joined, full_precision, join


class Steps(nn.Module):
    """A recurrent network whose first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x)[0]
        return states


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("model", "shape", "joins"),
    [
        (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout()), (8, 3), True),
        (nn.Conv1d(3, 5, 3), (8, 3, 9), True),
        (nn.RNN(3, 5, batch_first=True), (8, 6, 3), False),  # its state has samples in the second place
        (Steps(), (8, 6, 3), False),
        (Centred(), (8, 3), False),
        (nn.Flatten(), (3, 2), False),
    ],
)
def test_calls_are_joined_where_samples_are_computed_alone(
    model: nn.Module, shape: tuple[int, ...], joins: bool
) -> None:
    assert can_be_joined(model, Call((torch.randn(shape),), {})) is joins


def test_joined_calls_have_the_same_samples() -> None:
    calls = [Call((torch.randn(8, 3),), {"scale": 2.0}) for _ in range(6)]
    found = join(calls)
    assert [call.rows() for call in found] == [8 * JOINED_CALLS, 16]
    assert torch.equal(torch.cat([c.args[0] for c in found]), torch.cat([c.args[0] for c in calls]))
    assert all(call.kwargs == {"scale": 2.0} for call in found)


def test_calls_that_differ_are_left_alone() -> None:
    short, long = Call((torch.randn(8, 3),), {}), Call((torch.randn(8, 4),), {})
    other = Call((torch.randn(8, 3),), {"scale": 3.0})
    assert len(join([short, long, other, other])) == 3
    large = Call((torch.randn(300, 3),), {})
    assert len(join([large, large])) == 2, "memory was sized for one"


def precisions() -> list[str]:
    return [torch._C._get_fp32_precision_getter("cuda", operation) for operation in ("conv", "rnn", "matmul")]


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch 2.8 has the older switches alone"
)
@pytest.mark.parametrize("newer", [False, True])
def test_results_are_compared_in_full_precision_and_the_users_choice_comes_back(newer: bool) -> None:
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    before = precisions()
    try:
        if newer:
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "ieee", "tf32"
            cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        chosen = precisions()
        assert "tf32" in chosen
        with full_precision():
            assert "tf32" not in precisions()
            if not newer:
                assert not cudnn.allow_tf32, "code of a model may ask for it"
        assert precisions() == chosen
    finally:
        for operation, precision in zip(("conv", "rnn", "matmul"), before, strict=True):
            torch._C._set_fp32_precision_setter("cuda", operation, precision)
        torch.set_float32_matmul_precision("highest")
