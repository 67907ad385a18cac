"""AllReduce(overlap="forward") under random models and random loops: always what plain torch gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, alone, batch, in_threads, loss_of, seeded

Action = Literal[
    "step", "clipped step", "accumulated step", "skipped step", "forward", "evaluate", "inspect layer",
    "inspect optimizer", "copy", "learning rate", "rewind", "synchronize",
]  # fmt: skip
WIDTH = 6


class Net(nn.Module):
    """Layers by number; the same number again is the same layer, and one of them may serve marked steps."""

    def __init__(self, plan: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(max(plan) + 1))
        self.last = nn.Linear(WIDTH, 1)
        self.plan = plan
        self.short = False

    def forward(self, x: Tensor) -> Tensor:
        for number in self.plan[: 1 if self.short else None]:
            x = self.layers[number](x).tanh()
        out: Tensor = self.last(x)
        return out


@dataclass(frozen=True, slots=True)
class Loop:
    """What to train, how, and what else happens meanwhile."""

    plan: tuple[int, ...]
    bias: bool
    momentum: float
    weight_decay: float
    bucket_bytes: int
    actions: tuple[tuple[Action, bool], ...]
    """Each with whether forwards take the short way from then on, which leaves parameters unused."""

    def __call__(self, place: Place) -> Arrays:
        model = seeded(lambda: Net(self.plan, self.bias))
        assert isinstance(model, Net)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=self.momentum, weight_decay=self.weight_decay)
        seen: list[Tensor] = []
        with place.attach(model, optimizer, bucket_bytes=self.bucket_bytes) as link:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for step, (action, model.short) in enumerate(self.actions):
                x = batch(step)[0]
                if action.endswith("step"):
                    optimizer.zero_grad()
                    if action == "accumulated step":
                        with link.no_sync():
                            loss_of(model, place.part(100 + step)).backward()
                    loss_of(model, place.part(step)).backward()
                    if action == "skipped step":
                        continue
                    if action == "clipped step":
                        seen.append(link.clip_grad_norm_(0.1))
                    optimizer.step()
                elif action == "forward":
                    seen.append(model(x).detach())
                elif action == "evaluate":
                    with torch.inference_mode():
                        seen.append(model.eval()(x).clone())
                    model.train()
                elif action == "inspect layer":
                    seen += [t.clone() for t in model.layers[0].state_dict().values()]
                elif action == "inspect optimizer":
                    seen += tensors(optimizer.state_dict()["state"])
                elif action == "copy":
                    twin, twin_optimizer = copy.deepcopy((model, optimizer))
                    seen += [*twin.parameters(), *tensors(twin_optimizer.state_dict()["state"])]
                elif action == "learning rate":
                    optimizer.param_groups[0]["lr"] *= 0.7
                elif action == "rewind":
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                elif action == "synchronize":
                    link.synchronize()
                    seen += [p.norm() for p in model.parameters()]
        return arrays(model) | {f"seen {i}": t.detach().numpy().copy() for i, t in enumerate(seen)}


def tensors(state: dict[int, dict[str, Tensor | None]]) -> Iterator[Tensor]:
    for _, each in sorted(state.items()):  # by parameter: torch leaves them in the order of their first step
        yield from (value.clone() for value in each.values() if value is not None)


loops = st.builds(
    Loop,
    plan=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    bias=st.booleans(),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    bucket_bytes=st.sampled_from([8, 100, 400, 1 << 20]),
    actions=st.lists(
        st.tuples(st.one_of(st.just("step"), st.sampled_from(get_args(Action))), st.booleans()),
        min_size=4,
        max_size=14,
    ).map(tuple),
)


@settings(max_examples=40, derandomize=True)
@given(loops)
def test_any_loop_equals_plain_torch(loop: Loop) -> None:
    whole = alone(loop)
    (one,) = in_threads(1, loop, "forward")
    two = in_threads(2, loop, "forward")

    assert same_bits(one, whole)
    assert difference(two[0], whole) < 1e-12
    assert same_bits(*two)
