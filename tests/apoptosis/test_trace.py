"""What is understood of a model, and what is left alone, by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.apoptosis.networks import KINDS, make
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.proof import left_alone, prove
from thinwire.apoptosis.surgery import named_tensors
from thinwire.apoptosis.trace import trace
from thinwire.apoptosis.units import Group


def groups_of(model: nn.Module, *inputs: Tensor) -> dict[str, Group]:
    found = {}
    for group in trace(model, Call(inputs, {})):
        prove(model, group, Call(inputs, {}))
        found[group.name] = group
    return found


@pytest.mark.parametrize(
    ("kind", "shrinks"),
    [
        ("mlp", {"0": 6, "3": 7}),
        ("batch norm", {"0": 6, "3": 6}),
        ("conv2d", {"0": 6, "4": 6, "8": 5}),
        ("conv1d", {"0": 6, "3": 4}),
        ("residual", {"stem": 6}),
        ("concatenation", {"left": 6, "right": 8}),
        ("lstm", {"lstm": 6}),
        ("gru", {"embedding": 6, "gru": 8}),
        ("transformer", {"dense.0": 6}),
        ("tied", {"into": 6}),
    ],
)
def test_every_kind_has_groups_that_shrink(kind: str, shrinks: dict[str, int]) -> None:
    model, batch = make(kind, 6, "relu", 0)
    found = groups_of(model, batch)
    assert {name: group.size for name, group in found.items() if not group.frozen} == shrinks


def test_a_residual_sum_makes_one_group_of_several_layers() -> None:
    model, batch = make("residual", 6, "relu", 0)
    places = groups_of(model, batch)["stem"].places
    assert {("stem.weight", 0), ("first.weight", 0), ("first.weight", 1), ("norm.running_var", 0)} <= set(
        places
    )


def test_behind_a_flatten_a_channel_has_several_columns() -> None:
    model, batch = make("conv2d", 6, "relu", 0)
    assert groups_of(model, batch)["4"].places["8.weight", 1].shape == (6, 9)


def test_a_unit_of_an_lstm_has_four_rows() -> None:
    model, batch = make("lstm", 6, "relu", 0)
    assert groups_of(model, batch)["lstm"].places["lstm.weight_hh_l0", 0].tolist()[1] == [1, 7, 13, 19]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tracing_and_proving_leave_no_trace(kind: str) -> None:
    model, batch = make(kind, 6, "tanh", 0)
    model.train()
    model(batch).sum().backward()
    before = {name: (t, t.data_ptr(), t.clone(), t.grad) for name, t in named_tensors(model).items()}
    random = torch.get_rng_state()
    groups_of(model, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, tensor in named_tensors(model).items():
        same, pointer, value, grad = before[name]
        assert same is tensor
        assert tensor.data_ptr() == pointer
        assert torch.equal(tensor, value)
        assert tensor.grad is grad


class Odd(nn.Module):
    """A middle layer whose neurons are used in some way that forbids to remove one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(6, 6), nn.Linear(3 if way == "slice" else 6, 2)
        self.norm = nn.LayerNorm(6) if way == "layer norm" else nn.GroupNorm(2, 6)
        self.third = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.first(x).relu()
        if self.way == "output":
            return self.second(h), h
        if self.way == "slice":
            h = h[:, :3]
        elif self.way == "softmax":
            h = h.softmax(-1)
        elif self.way in ("layer norm", "group norm"):
            h = self.norm(h)
        elif self.way == "input":
            h = h + x
        elif self.way == "size":
            h = h / math.sqrt(h.shape[1])
        elif self.way == "number":
            h = h.view(-1, 6)
        elif self.way == "weight":
            both: Tensor = self.second(h) + nn.functional.linear(h, self.third.weight)
            return both
        elif self.way == "read":
            h = h * h.detach().tolist()[0][0]
        result: Tensor = self.second(h)
        return result


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("output", "output of the model"),
        ("slice", "cut apart by __getitem__"),
        ("softmax", "softmax"),
        ("layer norm", "LayerNorm"),
        ("group norm", "GroupNorm"),
        ("input", "meets other data in add"),
        ("size", "does not compute the same"),
        ("number", "does not work without one of its neurons"),
        ("weight", "linear"),
        ("read", "read by"),
    ],
)
def test_what_is_not_understood_is_left_alone_by_name(way: str, reason: str) -> None:
    torch.manual_seed(0)
    found = groups_of(Odd(way), torch.randn(5, 6))
    assert reason in found["first"].frozen


def test_of_a_transformer_layer_of_torch_the_mlp_can_go_and_attention_is_left_alone_by_name() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True), nn.Linear(8, 3)
    )
    found = groups_of(model, torch.randn(2, 5, 8))
    assert not found["0.linear1"].frozen
    alone = left_alone(model, list(found.values()))
    assert {"0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight"} <= alone.keys()
    assert "0.linear1" not in alone


def test_a_depthwise_convolution_follows_its_channels_and_one_in_groups_does_not() -> None:
    depthwise = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 3))
    grouped = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3, groups=2), nn.Conv2d(6, 2, 3))
    x = torch.randn(2, 1, 9, 9)
    assert ("1.weight", 0) in groups_of(depthwise, x)["0"].places
    assert not groups_of(depthwise, x)["0"].frozen
    assert "groups" in groups_of(grouped, x)["0"].frozen
