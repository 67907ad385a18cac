"""Apoptosis on the virtual clock: all replicas stop at one barrier, and go on as smaller ones.

What is decided is what workers in processes decide: from the same samples, in the same step. Sums and
decisions are sent over the modelled network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.apoptosis.calls import Call, undisturbed
from thinwire.apoptosis.settings import Apoptosis, parse
from thinwire.apoptosis.shrinking import Shrinking
from thinwire.apoptosis.surgery import Kept, Snapshot, cut, named_tensors
from thinwire.errors import check
from thinwire.events import Shrunk
from thinwire.recipes.config import RunConfig
from thinwire.recipes.learners import RecipeLearners
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.session import Session

Compute = Callable[[], ComputeModel]
"""How long the learners compute now."""


class VirtualEveryone:
    """All workers at once: what one of them has is already the sum, and only the time of sending passes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def sum_(self, data: Tensor) -> None:
        self._session.together(lambda wire: wire.all_reduce_(torch.empty_like(data)))

    def total(self, values: Sequence[float]) -> list[float]:
        self.sum_(torch.tensor(values, dtype=torch.float64))
        return list(values)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * len(self._session.hosts)

    def broadcast_tensors_(self, tensors: Iterable[Tensor], source: int) -> None:
        for data in tensors:
            self._session.together(
                lambda wire, like=data: wire.broadcast_(torch.empty_like(like), source=source)  # type: ignore[misc]
            )


class VirtualWorkers:
    """All workers of a simulation as the one that apoptosis acts on; replica 0 stands for them."""

    rank = 0

    def __init__(self, session: Session, learners: RecipeLearners, compute: Compute) -> None:
        self._session, self._learners, self._compute = session, learners, compute
        self.strategy = session.strategy
        self.world_size = len(session.hosts)
        self.everyone = VirtualEveryone(session)

    @property
    def steps(self) -> int:
        return self._session.stats(self._session.hosts[0]).steps

    def synchronize(self) -> None:
        """Nothing is under way at a barrier."""

    def average_(self) -> None:
        replicas = self._learners.replicas
        mean = replicas.mean(self._session.hosts)
        for host in self._session.hosts:
            replicas.copy_(host, mean)
        for tensor in named_tensors(mean).values():
            self.everyone.sum_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """What `restore` needs: strategies' states, and all replicas but the first."""
        return {"cores": self._states(), "others": [Snapshot.of(*self._parts(h)) for h in self._others()]}

    def reshape(
        self, kept: Kept, *, change: Callable[[], None], move: Callable[[dict[str, Tensor]], None]
    ) -> None:
        saved = [self._session.worker(h).core.shrunken_state(kept, move) for h in self._session.hosts]

        def cut_all() -> None:
            change()
            first = named_tensors(self._learners.replicas.model(0))
            for host in self._others():
                model, optimizers = self._parts(host)
                cut(model, optimizers, kept)
                for name, tensor in named_tensors(model).items():
                    tensor.copy_(first[name])  # equal before, and what was folded in is equal too

        self._reassemble(saved, cut_all)

    def restore(self, saved: dict[str, Any], change: Callable[[], None]) -> None:
        def restore_all() -> None:
            change()
            for host, snapshot in zip(self._others(), saved["others"], strict=True):
                snapshot.restore(*self._parts(host))

        self._reassemble(saved["cores"], restore_all)

    def _reassemble(self, saved: Sequence[dict[str, Any]], change: Callable[[], None]) -> None:
        @torch.no_grad()
        def change_all() -> None:
            change()
            self._learners.replicas.reshaped()

        self._session.reassemble(saved, change_all, self._compute)

    def _states(self) -> list[dict[str, Any]]:
        return [self._session.worker(host).core.state_dict() for host in self._session.hosts]

    def _others(self) -> Sequence[int]:
        return self._session.hosts[1:]

    def _parts(self, host: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        return self._learners.replicas.model(host), [self._learners.of(host).optimizer]


def join(
    config: RunConfig,
    session: Session,
    learners: RecipeLearners,
    compute: Compute,
    emit: Callable[[Shrunk], object],
) -> VirtualShrinking | None:
    """What a run's config says about apoptosis, joined to its simulation."""
    if not config.apoptosis:
        return None
    settings = parse(config.apoptosis).within(learners.plan.num_steps)
    faults = [str(fault) for fault in session.faults]
    check(not faults, "faults", "left out with apoptosis in a simulation", faults)
    check(not settings.lasso, "lasso", "left out in a simulation", settings.lasso)
    check(config.shuffle != "ring", "shuffle", "dealt or own with apoptosis in a simulation", config.shuffle)
    return VirtualShrinking(settings, VirtualWorkers(session, learners, compute), learners, emit)


class VirtualShrinking:
    """Apoptosis joined to a simulation."""

    def __init__(
        self,
        settings: Apoptosis,
        workers: VirtualWorkers,
        learners: RecipeLearners,
        emit: Callable[[Shrunk], object],
    ) -> None:
        self._learners, self._workers, self._emit = learners, workers, emit
        self._settings, self._told = settings, 0
        self._first = learners.replicas.model(0)
        self._shrinking = Shrinking(settings, workers, self._first, [learners.of(0).optimizer])
        self._shrinking.leave()  # replicas computed at once call no hooks: calls are told

    @property
    def next_step(self) -> float:
        """At which all workers have to stop."""
        after = self._workers.steps + 1
        return after + self._settings.steps_to_next(after)

    def stepped(self, host: int, loss: float) -> None:
        """A worker has made a step."""
        self._shrinking.observe(loss)
        done = self._workers.steps - 1  # before it
        if self._shrinking.listens(done):
            self._shrinking.remember(self._call(host), done, at_once=self._workers.world_size)

    def act(self) -> float:
        """All workers have come to `next_step`; the seconds that deciding has taken here."""
        began_s = time.perf_counter()
        self._shrinking.stepped()
        for event in self._shrinking.history[self._told :]:
            self._emit(event)
        self._told = len(self._shrinking.history)
        return time.perf_counter() - began_s

    def _call(self, host: int) -> Call:
        """How the recipe calls its model with the batch that a worker has trained on."""
        found = list[Call]()

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(Call(args, kwargs).copy())

        handle = self._first.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with undisturbed(self._first):
                self._learners.setup.loss(self._first, *self._learners.of(host).batch, None)
        finally:
            handle.remove()
        return found[0]
