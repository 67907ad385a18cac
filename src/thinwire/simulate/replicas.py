"""Many replicas of one model in one process, each a real model with its own parameters and random numbers.

The replicas' parameters and buffers are rows of one stacked tensor each. So gradients can be computed for
many replicas at once (`batched`: torch.func's vmap over the rows) or for one after another through its own
module, on the same memory; everything else sees ordinary modules.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.simulate.mapped import Carried, Loss, Mapped, Rows

CHUNK = 64
"""Replicas computed at once at most: all their activations are in memory."""
SMALL_BATCH = 1024
"""Numbers in one replica's batch up to which batching is faster on a CPU (digits-cnn: 2.6 times with one
image, even with 16; mnist-cnn with 32 images: 2.7 times slower, its convolutions become grouped ones)."""


@dataclass(slots=True)
class _Slot:
    model: nn.Module
    parameters: list[nn.Parameter]
    random: torch.Generator
    asked: tuple[Tensor, Tensor] | None = None
    carried: Carried = None
    loss: float = 0.0


class Replicas:
    """As many copies of `model` as there are seeds; replica i draws its random numbers from `seeds[i]`."""

    def __init__(
        self, model: nn.Module, loss: Loss, seeds: Sequence[int], *, batched: bool | None = None
    ) -> None:
        """`batched` None: what is faster here, found out with the first batches."""
        self.batched = batched is not False
        """Whether many are computed at once; turns to False when that fails or does not pay."""
        self._proven, self._must_pay = False, batched is None
        self._loss, self._device = loss, next(model.parameters()).device
        count = len(seeds)
        self._parameters = {n: torch.stack([p.detach()] * count) for n, p in model.named_parameters()}
        self._buffers = {n: torch.stack([b] * count) for n, b in model.named_buffers()}
        self._slots = [self._replica(deepcopy(model), seed) for seed in seeds]
        self._lay_out()
        self._trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._mapped = Mapped(model, loss, self._trainable, self._parameters, self._buffers)
        self._waiting: list[int] = []

    def _replica(self, model: nn.Module, seed: int) -> _Slot:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return _Slot(model, trainable, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Make the parameters and buffers of each replica rows of the stacked ones."""
        for index, slot in enumerate(self._slots):
            for name, parameter in slot.model.named_parameters():
                parameter.set_(self._parameters[name][index])  # type: ignore[call-overload]
            for name, stacked in self._buffers.items():
                owner, _, last = name.rpartition(".")
                slot.model.get_submodule(owner)._buffers[last] = stacked[index]

    @torch.no_grad()
    def reshaped(self) -> None:
        """The parameters and buffers of all replicas have got another shape, each by itself: stack them."""
        models = [slot.model for slot in self._slots]
        for stacked, names in ((self._parameters, "named_parameters"), (self._buffers, "named_buffers")):
            rows = [dict(getattr(model, names)()) for model in models]
            for name in stacked:
                stacked[name] = torch.stack([row[name].detach() for row in rows])
        for slot in self._slots:
            for parameter in slot.parameters:
                parameter.grad = None  # of the old shape
        self._lay_out()
        self._mapped = Mapped(models[0], self._loss, self._trainable, self._parameters, self._buffers)
        self._proven = False

    def state_dict(self) -> dict[str, Any]:
        """All replicas between two epochs; what is carried over from batch to batch is not in it."""
        return {
            "parameters": {name: stacked.clone() for name, stacked in self._parameters.items()},
            "buffers": {name: stacked.clone() for name, stacked in self._buffers.items()},
            "random": [slot.random.get_state() for slot in self._slots],
            "batched": self.batched,
            "proven": self._proven,
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for own, given in ((self._parameters, saved["parameters"]), (self._buffers, saved["buffers"])):
            for name, stacked in own.items():
                stacked.copy_(given[name])
        for slot, state in zip(self._slots, saved["random"], strict=True):
            slot.random.set_state(state)
        self.batched, self._proven = saved["batched"], saved["proven"]

    def model(self, index: int) -> nn.Module:
        """Replica `index`, an ordinary module."""
        return self._slots[index].model

    def loss(self, index: int) -> float:
        """The loss of a replica's last batch."""
        return self._slots[index].loss

    def forget(self, index: int) -> None:
        """Carry nothing over to the next batch."""
        self._slots[index].carried = None

    @contextmanager
    def random(self, index: int) -> Iterator[None]:
        """In here torch's own random numbers, on the CPU, are this replica's."""
        before, own = torch.get_rng_state(), self._slots[index].random
        torch.set_rng_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def ask(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """This replica's parameters are what this batch meets; they do not change before `learn`."""
        self._slots[index].asked = inputs, targets
        self._waiting.append(index)

    def withdraw(self) -> None:
        """Forget what was asked for and not learnt: those steps were given up."""
        for index in self._waiting:
            self._slots[index].asked = None
        self._waiting = []

    def learn(self, index: int) -> None:
        """Leave the gradients of the batch asked for in the replica's parameters.

        All who have asked so far are computed with it: their parameters do not change any more.
        """
        if self._slots[index].asked is None:
            return  # computed with another one
        groups = defaultdict[tuple[torch.Size, bool], list[int]](list)
        for waiting in self._waiting:
            slot = self._slots[waiting]
            assert slot.asked is not None
            groups[slot.asked[0].shape, slot.carried is None].append(waiting)
        self._waiting = []
        for group in groups.values():
            for start in range(0, len(group), CHUNK):
                members = sorted(group)[start : start + CHUNK]
                if self.batched and len(members) > 1 and not self._proven:
                    self._try_together(members)
                together = self.batched and len(members) > 1
                (self._learn_together if together else self._learn_each)(members)

    def _try_together(self, members: list[int]) -> None:
        """Find out whether the model can be batched and, unless it was asked for, whether that pays."""
        try:
            self._rehearse(self._learn_together, members)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):  # torch refuses
            self.batched = False
            return
        self._proven = True
        if self._must_pay:
            self._rehearse(self._learn_each, members)  # the first time of either is no measure,
            self._rehearse(self._learn_together, members)  # nor is one that is recorded
            together_s = self._rehearse(self._learn_together, members)
            self.batched = together_s <= self._rehearse(self._learn_each, members)

    def _rehearse(self, learn: Callable[[list[int]], None], members: list[int]) -> float:
        """Seconds it takes; leaves no trace but gradients."""
        slots = [self._slots[index] for index in members]
        before = [(slot.asked, slot.carried, slot.random.get_state()) for slot in slots]
        buffers = {name: stacked.clone() for name, stacked in self._buffers.items()}
        began_s = time.perf_counter()
        try:
            learn(members)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return time.perf_counter() - began_s
        finally:
            for slot, (asked, carried, state) in zip(slots, before, strict=True):
                slot.asked, slot.carried = asked, carried
                slot.random.set_state(state)
            for name, stacked in self._buffers.items():
                stacked.copy_(buffers[name])

    def _learn_each(self, members: list[int]) -> None:
        for index in members:
            slot = self._slots[index]
            assert slot.asked is not None
            (inputs, targets), slot.asked = slot.asked, None
            for parameter in slot.parameters:
                parameter.grad = None
            with self.random(index):
                if self._device.type == "cuda":  # its numbers follow from the replica's own on the CPU
                    torch.cuda.manual_seed(int(torch.randint(2**62, ())))
                loss, slot.carried = self._loss(slot.model, inputs, targets, slot.carried)
                loss.backward()
            slot.loss = loss.item()

    def _learn_together(self, members: list[int]) -> None:
        slots = [self._slots[index] for index in members]
        rows: Rows = members
        if members[-1] - members[0] == len(members) - 1:
            rows = slice(members[0], members[-1] + 1)  # a view, no copy
        given = ((*(slot.asked or ()), *(slot.carried or ())) for slot in slots)
        inputs = [torch.stack(parts) for parts in zip(*given, strict=True)]
        losses, gradients, carry = self._mapped.learn(rows, inputs, [slot.random for slot in slots])
        split = [() if g is None else g.unbind() for g in gradients]  # None if forward does not use it
        for place, (slot, loss) in enumerate(zip(slots, losses.tolist(), strict=True)):
            slot.asked, slot.loss = None, loss
            slot.carried = tuple(part[place].clone() for part in carry) or None
            for parameter, rows_of in zip(slot.parameters, split, strict=True):
                parameter.grad = rows_of[place] if rows_of else None

    @contextmanager
    def lending_gradients(self, index: int, *, to: int) -> Iterator[None]:
        """In here replica `to` has the gradients of replica `index`."""
        borrower = self._slots[to].parameters
        own = [parameter.grad for parameter in borrower]
        for parameter, lent in zip(borrower, self._slots[index].parameters, strict=True):
            parameter.grad = lent.grad
        try:
            yield
        finally:
            for parameter, before in zip(borrower, own, strict=True):
                parameter.grad = before

    def same_gradients(self, index: int, other: int) -> bool:
        """Whether two replicas have the same ones, to the bit."""
        ours, theirs = ([p.grad for p in self._slots[i].parameters] for i in (index, other))
        pairs = zip(ours, theirs, strict=True)
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)

    @torch.no_grad()
    def mean(self, members: Sequence[int]) -> nn.Module:
        """A model of its own: the mean of these replicas, buffers included."""
        rows, model = list(members), deepcopy(self._slots[members[0]].model)
        for name, parameter in model.named_parameters():
            parameter.data = self._parameters[name][rows].mean(0)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(self._buffers[name][rows].mean(0))
        return model

    @torch.no_grad()
    def spread_(self) -> None:
        """Overwrite the trainable parameters of all replicas with those of the first."""
        stacked = [self._parameters[name] for name in self._trainable]
        others = [rows[1:] for rows in stacked]
        torch._foreach_copy_(others, [rows[:1].expand_as(rows[1:]) for rows in stacked])

    @torch.no_grad()
    def copy_(self, index: int, model: nn.Module) -> None:
        """Overwrite a replica's parameters and buffers with those of `model`."""
        for name, parameter in model.named_parameters():
            self._parameters[name][index].copy_(parameter)
        for name, buffer in model.named_buffers():
            self._buffers[name][index].copy_(buffer)

    @torch.no_grad()
    def distance(self, members: Sequence[int]) -> float:
        """Root mean square distance of these replicas from their mean, relative to the mean."""
        rows, apart, size = list(members), 0.0, 0.0
        for name in self._trainable:
            own = self._parameters[name][rows].double()
            mean = own.mean(0)
            apart += float((own - mean).square().sum())
            size += len(rows) * float(mean.square().sum())
        return (apart / size) ** 0.5 if size > 0 else 0.0


def worth_batching(inputs: Tensor) -> bool | None:
    """Whether replicas with batches like this one are faster together; None: try it, as on a GPU."""
    # On a CPU it is a rule, so that the same command gives the same bits.
    return inputs.numel() <= SMALL_BATCH if inputs.is_cpu else None
