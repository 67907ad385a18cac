"""Backward passes that raise: repeated if nothing was sent yet, refused if something was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exact.compare import Arrays, arrays, same_bits
from tests.exact.place import Place, in_threads, loss_of, net, sgd
from thinwire.errors import UsageError
from thinwire.strategies.base import Overlap


class Trap(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("out of luck")


def fail(model: nn.Module, place: Place) -> None:
    """Backward through the last layer, and no further."""
    x, y = place.part(0)
    *first, last = model.children()
    with pytest.raises(ArithmeticError, match="out of luck"):
        loss_of(last, (Trap.apply(nn.Sequential(*first)(x)), y)).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
def test_a_failed_backward_is_repeated(overlap: Overlap) -> None:
    def failing(place: Place) -> Arrays:
        model = net()
        optimizer = sgd(model)
        with place.attach(model, optimizer, bucket_bytes=1 << 20):  # one bucket, sent when all is well
            for step in range(7):
                optimizer.zero_grad()
                if place.rank == 1:  # one worker's bad luck is not the others' business
                    fail(model, place)
                    optimizer.zero_grad()
                loss_of(model, place.part(step)).backward()
                optimizer.step()
        return arrays(model)

    assert same_bits(*in_threads(2, failing, overlap))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_after_buckets_were_sent_it_cannot_be_repeated(overlap: Overlap) -> None:
    def failing(place: Place) -> Arrays:
        model = net()
        before = copy.deepcopy(model.state_dict())
        optimizer = sgd(model)
        with place.attach(model, optimizer, bucket_bytes=64):
            loss_of(model, place.part(0)).backward()
            optimizer.zero_grad()
            fail(model, place)
            optimizer.zero_grad()
            with pytest.raises(UsageError, match=r"1 of \d buckets were sent when backward failed"):
                loss_of(model, place.part(0)).backward()
        model.load_state_dict(before)
        with place.attach(model, optimizer, bucket_bytes=64):
            loss_of(model, place.part(0)).backward()
            optimizer.step()
        return arrays(model)

    assert same_bits(*in_threads(2, failing, overlap))
