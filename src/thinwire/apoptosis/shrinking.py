"""One training that shrinks: all workers decide and change together, in the same step, or none does."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.apoptosis.agreement import agree, check_all, make_alike
from thinwire.apoptosis.calls import Call, can_be_joined
from thinwire.apoptosis.lasso import GroupLasso
from thinwire.apoptosis.pace import RemovalPace, Rests
from thinwire.apoptosis.plan import MOST_WEIGHED, Limits, shrink_groups
from thinwire.apoptosis.proof import left_alone, prove
from thinwire.apoptosis.recent import RecentCalls
from thinwire.apoptosis.settings import Apoptosis
from thinwire.apoptosis.surgery import (
    Kept,
    Removal,
    Snapshot,
    cut,
    fold,
    fold_tensors,
    kept_indices,
)
from thinwire.apoptosis.trace import trace
from thinwire.apoptosis.units import Group
from thinwire.apoptosis.workers import Workers
from thinwire.events import Shrunk

_log = logging.getLogger("thinwire")
QUIET_STEPS = 16
"""Calls are looked at after so many at the latest."""
GPU_MULTIPLE = 8
"""Kernels of GPUs work on tiles: other widths take as long as the next multiple, or longer."""


class Shrinking:
    """Apoptosis joined to a link (`link.companion`)."""

    def __init__(
        self, settings: Apoptosis, link: Workers, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self.settings = settings
        self.history: list[Shrunk] = []
        """What has happened so far, the same on all workers."""
        self._link, self._optimizers = link, optimizers
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._recent = RecentCalls(link.world_size)
        self._pace, self._rests = (
            RemovalPace(adaptive=settings.mode == "adaptive", first=settings.first // settings.every or 1),
            Rests(),
        )
        self._quiet_until = 0
        """Steps that are done when calls are looked at again."""
        self._told: set[str] = set()
        self._undo: tuple[Snapshot, dict[str, Any], list[Group]] | None = None
        self._groups: list[Group] | None = None
        self._least: dict[str, int] = {}
        """Neurons that layers keep for what they feed, by the widths they were built with."""
        self._lasso = GroupLasso(settings.lasso, optimizers) if settings.lasso else None
        self._handle = model.register_forward_pre_hook(self._record, with_kwargs=True)

    # -- what a link asks ---------------------------------------------------------------------------

    def observe(self, loss: float | Tensor) -> None:
        self._pace.observe(loss)

    def stepped(self) -> None:
        done = self._link.steps
        if self._lasso is not None and self._lasso.is_due(done) and self._recent:
            self._link.synchronize()
            self._lasso.apply_(self._model, self.groups())
        if self.settings.is_due(done) and not self._pace.skip():
            self._event()
        if done == self.settings.stop:
            self._undo = None  # a copy of everything
            self._recent.clear()

    def leave(self) -> None:
        self._handle.remove()
        self._recent.clear()

    def instruments(self) -> dict[str, float]:
        return {"parameters": float(sum(p.numel() for p in self._model.parameters()))}

    def state_dict(self) -> dict[str, Any]:
        own = {"pace": self._pace.state_dict(), "rests": self._rests.state_dict(), "least": self._least}
        return {**own, "events": len(self.history)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._pace.load_state_dict(saved["pace"])
        self._rests.load_state_dict(saved["rests"])
        self._quiet_until = 0
        self._least = dict(saved["least"])
        self._undo = self._groups = None  # what came before the checkpoint is gone

    # -- recording ----------------------------------------------------------------------------------

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the last calls before an event; earlier ones would be forgotten again."""
        done = self._link.steps
        if done < self._quiet_until or not module.training or not torch.is_grad_enabled():
            return
        self.remember(Call(args, kwargs), done)
        if not self.listens(done):
            self._quiet_until = done + self._quiet_steps(done)

    def remember(self, given: Call, done: int, *, at_once: int = 1) -> None:
        """Keep a call made after so many steps if an event may be near; `at_once`: calls in every step."""
        self._recent.measure(given, at_once=at_once)
        if self.listens(done):
            self._recent.add(given)

    def _quiet_steps(self, done: int) -> int:
        """Steps in which calls need not be looked at, which costs small networks a visible part of a step;
        few, so that other numbers of samples are noticed."""
        if self._lasso is not None:
            return 1
        left = self.settings.steps_to_next(done + 1) + 1 - self._recent.num_steps
        return max(1, int(min(left, QUIET_STEPS)))

    def listens(self, done: int) -> bool:
        """Whether calls are kept after so many steps."""
        ahead = 1 + self.settings.steps_to_next(done + 1)
        soon = ahead <= self._recent.num_steps and self._pace.removal_is_next
        return soon or (self._lasso is not None and not self._recent)

    # -- an event -----------------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """The neurons of the model as it is now; those that cannot go say why."""
        if self._groups is None:
            call = self._recent.last
            found = trace(self._model, call)
            self._recent.joins = can_be_joined(self._model, call)
            self._least = {g.name: self._least.get(g.name, g.least) for g in found}
            found = [replace(group, least=self._least[group.name]) for group in found]
            for group in found:
                prove(self._model, group, call)
            self._set_groups(found)
        assert self._groups is not None
        return self._groups

    def _set_groups(self, groups: list[Group]) -> None:
        self._groups = groups
        self._recent.expect(groups)

    def _event(self) -> None:
        began_s = time.perf_counter()
        link = self._link
        link.synchronize()
        blind = self._pace.removal_is_next and not self._recent
        losses = link.everyone.total([*self._pace.sums(), float(blind)])
        if losses[-1]:
            self._warn(
                "nothing is removed, since the forward of the attached module was not called in training "
                "mode: attach the module that the training loop calls"
            )
            return
        if self._pace.adaptive and losses[0] < 2:
            self._warn(
                "mode='adaptive' decides by the loss, and needs two of them between two checks: call "
                f"link.observe(loss) in every step, got {losses[0]:.0f} in {self.settings.every} step(s)"
            )
        decision = self._pace.decide(losses[:-1])
        if decision == "undo" and self._undo is not None:
            self._bring_back(began_s)
        self._undo = None  # later on, too much training would be lost with it
        if decision != "remove":
            return  # a loss that rises with nothing to undo is no reason to remove more
        if not link.strategy.replicas_agree:
            link.average_()
        removals = self._choose()
        if removals:
            kept = kept_indices(self._model, removals)
            check_all(self._link, self._model, self._optimizers, kept)
            self._remove(removals, kept, began_s)
        self._recent.clear()

    def _warn(self, text: str) -> None:
        if self._link.rank == 0 and text not in self._told:
            self._told.add(text)
            _log.warning("apoptosis: %s", text)

    def _choose(self) -> list[Removal]:
        awake, limits = self._rests.awake(len(self.groups())), self._limits()
        parts = [
            (number, part)
            for number in awake
            for part in self.groups()[number].parts(MOST_WEIGHED, limits.multiple)
        ]
        found = agree(
            self._link,
            self._model,
            [part for _, part in parts],
            self._recent.to_measure(),
            limits,
        )
        gone = {id(each.group): len(each.dropped) for each in found}
        for number in awake:
            own = sum(gone.get(id(part), 0) for at, part in parts if at == number)
            self._rests.weighed(number, own / self.groups()[number].size)
        return found

    def _limits(self) -> Limits:
        settings, device = self.settings, next(self._model.parameters()).device
        return Limits(
            budget=settings.limit * self._pace.strength,
            min_width=settings.min_width,
            multiple=settings.multiple or (GPU_MULTIPLE if device.type == "cuda" else 1),
        )

    def _remove(self, removals: Sequence[Removal], kept: Kept, began_s: float) -> None:
        link, model = self._link, self._model
        before = self._widths()
        if self._pace.adaptive:
            self._undo = (Snapshot.of(model, self._optimizers, kept), link.state_dict(), self.groups())

        def change() -> None:
            fold(model, removals)
            cut(model, self._optimizers, kept)

        def move(values: dict[str, Tensor]) -> None:
            for removal in removals:
                values.update(fold_tensors(values, removal))

        link.reshape(kept, change=change, move=move)
        make_alike(self._link, model)
        self._set_groups(shrink_groups(self.groups(), kept))
        causes = sum((Counter(each.causes) for each in removals), Counter[str]())
        gone = sum(len(each.dropped) for each in removals)
        self._note(gone, dict(causes), max(each.change for each in removals), began_s, before)

    def _bring_back(self, began_s: float) -> None:
        assert self._undo is not None
        (snapshot, state, groups), self._undo = self._undo, None
        before = self._widths()
        self._link.restore(state, lambda: snapshot.restore(self._model, self._optimizers))
        self._set_groups(groups)
        gone = sum(before.values()) - sum(self._widths().values())
        self._note(gone, {"undone": 1}, 0.0, began_s, before)
        self._recent.clear()

    # -- telling ------------------------------------------------------------------------------------

    def _widths(self) -> dict[str, int]:
        return {group.name: group.size for group in self.groups()}

    def _note(
        self, removed: int, causes: dict[str, int], change: float, began_s: float, before: dict[str, int]
    ) -> None:
        self.history.append(
            Shrunk(
                step=self._link.steps,
                widths=self._widths(),
                before=before,
                num_parameters=sum(p.numel() for p in self._model.parameters()),
                removed=max(0, removed),
                brought_back=max(0, -removed),
                causes=causes,
                change=change,
                seconds=time.perf_counter() - began_s,
                left_alone=left_alone(self._model, self.groups()),
            )
        )
