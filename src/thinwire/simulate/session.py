"""A whole simulation: workers on one clock, while some slow down, are lost or join."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, Protocol

from thinwire.engine.core import Stats
from thinwire.engine.driver import Task
from thinwire.errors import PeerLost, UsageError, check
from thinwire.hosts.description import Fault
from thinwire.simulate.clock import Clock, ComputeModel, Pace, virtual_world
from thinwire.simulate.network import Network
from thinwire.simulate.worker import Learner, Stage, VirtualWorker
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic
from thinwire.wire.local import LocalWorld
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work

NOTICE_S = 0.01
"""After this long the others know of a worker that was lost: a broken connection is noticed at once."""


class Learners(Protocol):
    """What is trained, by host."""

    def of(self, host: int) -> Learner: ...

    def change(self, hosts: tuple[int, ...], joined: Collection[int], furthest: int) -> None:
        """Share out what is left of this epoch anew; what was drawn and not stepped with counts as left.

        `hosts`: who trains from now on, in order of rank; `joined`: those of them who were not there before;
        `furthest`: of those who were, the one that has done the most steps.
        """
        ...


class Session:
    """The workers of a simulation, epoch after epoch."""

    def __init__(
        self,
        network: Network,
        strategy: Strategy,
        learners: Learners,
        model: ComputeModel,
        *,
        jitter: float = 0.0,
        seed: int = 0,
        recovery_s: float = 0.0,
    ) -> None:
        description = network.description
        self.clock = Clock()
        self.hosts = tuple(range(len(description.hosts)))
        """Where workers are, in order of rank."""
        self.happened: list[str] = []
        """Faults that have come true, in words."""
        self.num_steps = math.inf
        """Steps after which every worker stops, wherever it is in its epoch."""
        self.strategy, self.faults = strategy, description.faults
        self._network, self._learners, self._model = network, learners, model
        self._recovery_s = recovery_s
        self._past = dict.fromkeys(self.hosts, Stats())
        self._lost: set[int] = set()
        self._joining: list[int] = []
        self._broken = False
        self._tasks: dict[int, Task] = {}
        self._by_step: list[Fault] = []
        self._acting_for: Mapping[int, int] = network.kinds if model.alike else {}
        """By host: the host of the worker that acts for its own; empty if each acts for itself."""
        self._num_alike: Mapping[int, int] = network.num_alike if model.alike else {}
        acting = sorted(self._num_alike)
        network.rest(acting or None)
        played = [description.hosts[index] for index in acting] or description.hosts
        self._paces = {h.index: Pace(h.speed, jitter=jitter, seed=(seed, h.index)) for h in played}
        self._world, self._workers = self._assemble()
        for fault in description.faults:
            self._expect(fault)

    def stats(self, host: int) -> Stats:
        """The statistics of the worker there, or of the last one that was."""
        past, acting = self._past[host], self._acting_for.get(host, host)
        if acting not in self._workers:
            return past
        now = self._workers[acting].core.stats
        rounds, traffic = past.rounds + now.rounds, past.traffic + now.traffic
        return replace(now, rounds=rounds, traffic=traffic, exposed_s=past.exposed_s + now.exposed_s)

    def worker(self, host: int) -> VirtualWorker:
        """The worker that acts there."""
        return self._workers[self._acting_for.get(host, host)]

    def acts_for(self, host: int) -> int:
        """How many workers, itself included, the one there acts for."""
        return self._num_alike.get(host, 1)

    def state_dict(self) -> dict[str, Any]:
        """Where clock, network and workers stand between two epochs, when nothing is on the wire."""
        if self._by_step or self.happened or self._network.description.faults:
            raise UsageError("a simulation with faults cannot be saved", hint="run it in one go")
        stats = [self.stats(host) for host in self.hosts]
        return {
            "now_s": self.clock.now_s,
            "network": self._network.state_dict(),
            "paces": [pace.state_dict() for pace in self._paces.values()],
            "stats": [(each.rounds, astuple(each.traffic), each.exposed_s) for each in stats],
            "workers": [worker.state_dict() for worker in self._workers.values()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there; nothing may have been trained yet."""
        self.clock.now_s = saved["now_s"]
        self._network.load_state_dict(saved["network"])
        for pace, state in zip(self._paces.values(), saved["paces"], strict=True):
            pace.load_state_dict(state)
        for host, (rounds, traffic, exposed_s) in zip(self.hosts, saved["stats"], strict=True):
            self._past[host] = Stats(rounds=rounds, traffic=Traffic(*traffic), exposed_s=exposed_s)
        for worker in self._workers.values():
            worker.load_state_dict(saved["workers"])

    def epoch(self) -> None:
        """Train until every worker has gone through its batches."""
        self._run()
        while self._lost or self._joining:
            self._change()
            if not (self._lost or self._joining):  # nothing more has happened while they recovered
                self._run()

    def together(self, call: Callable[[Wire], Work]) -> None:
        """Have all workers do one operation outside of training, and wait for it."""
        works = [worker.core.outside.issue(call) for worker in self._workers.values()]
        self.clock.run(until=lambda: all(work.done() for work in works))

    def reassemble(
        self, saved: Sequence[dict[str, Any]], change: Callable[[], None], compute: Callable[[], ComputeModel]
    ) -> None:
        """Go on with parameters of another shape, between two steps: `saved` has the strategies' states, in
        order of rank, for the shapes that `change` gives the learners' parameters; `compute` then says how
        long they take."""
        steps = max(worker.core.steps for worker in self._workers.values())
        for host in self.hosts:
            self._past[host] = self.stats(host)
        change()
        self._model = compute()
        self._tasks.clear()
        self._world, self._workers = self._assemble(steps)
        for worker in self._workers.values():
            worker.core.load([{**each, "steps": steps} for each in saved])

    def _run(self) -> None:
        running, self._broken = set(self._workers), False
        for host, worker in self._workers.items():
            worker.stop_at = self.num_steps
            self._tasks[host] = worker.train()
            self._tasks[host].when_done(partial(running.discard, host))
        self.clock.run(until=lambda: self._broken or not running)
        for host, task in self._tasks.items():
            if host not in self._lost and task.error is not None and not self._broken:
                raise task.error
        if running and not self._broken:
            waiting = {f"worker {w.rank} waits {self._tasks[h].waits_for}" for h, w in self._workers.items()}
            raise UsageError("deadlock: " + "; ".join(sorted(waiting)[:5]))

    def _expect(self, fault: Fault) -> None:
        ends = fault.seconds is not None or fault.kind not in ("pause", "cut")
        check(ends, f"fault {fault.kind}", "given seconds= in a simulation", str(fault))
        if fault.after_s is not None:
            self.clock.at(fault.after_s, partial(self._apply_fault, fault))
        elif fault.step == 0:
            self.clock.soon(partial(self._apply_fault, fault))
        else:
            self._by_step.append(fault)

    def _stepped(self, worker: VirtualWorker) -> None:
        """Let what was to happen at this step happen, once the worker waits again."""
        host = self.hosts[worker.rank]
        for fault in list(self._by_step):
            concerned = fault.host == host or fault.host not in self.hosts
            if concerned and fault.step is not None and worker.core.steps >= fault.step:
                self._by_step.remove(fault)
                self.clock.soon(partial(self._apply_fault, fault))

    def _apply_fault(self, fault: Fault) -> None:
        self.happened.append(f"{self.clock.now_s:.3f} s: {fault}")
        host, until_s = fault.host, self.clock.now_s + (fault.seconds or 0.0)
        if fault.kind == "cut":
            self._network.cut(host, fault.site, until_s)
        elif host is None:
            return  # a cut that heals by itself is all that befalls a site
        elif fault.kind == "kill":
            self._kill(host)
        elif fault.kind == "rejoin":
            self._join(host)
        elif fault.kind == "pause":
            self._paces[host].stopped_until_s = until_s
        else:
            self._paces[host].slow(fault.speed or 1.0)  # heal has none
            if fault.seconds is not None:
                self.clock.at(until_s, partial(self._paces[host].slow, 1.0))

    def _kill(self, host: int) -> None:
        if host not in self.hosts or host in self._lost:
            return
        self._lost.add(host)
        error = PeerLost(f"the worker on host {host} was killed at {self.clock.now_s:.3f} s", rank=host)
        self._stop(host, error)
        self.clock.at(self.clock.now_s + NOTICE_S, partial(self._break, self._world, error))

    def _break(self, world: LocalWorld, error: PeerLost) -> None:
        """The others have noticed: the step under way is given up by all."""
        if world is not self._world:
            return  # they have noticed already, and gone on without it
        world.lose(error)
        self._broken = True
        for host in self.hosts:
            self._stop(host, error)

    def _stop(self, host: int, error: PeerLost) -> None:
        task = self._tasks.get(host)
        if task is not None and not task.done():
            task.coroutine.close()
            task.fail(error)

    def _join(self, host: int) -> None:
        if (host in self.hosts and host not in self._lost) or host in self._joining:
            return
        if not self._joining:  # else all know already where they stop, and some have
            after = 1 + max(worker.core.steps for worker in self._workers.values())
            for worker in self._workers.values():
                worker.stop_at = after
        self._joining.append(host)

    def _change(self) -> None:
        stay = [host for host in self.hosts if host not in self._lost]
        joined, self._joining = self._joining, []
        if not stay:
            raise PeerLost("all workers were killed", hint="leave one of them alive")
        for host in self.hosts:
            self._past[host] = self.stats(host)
        saved = {host: self._workers[host].core.state_dict() for host in stay}
        furthest = max(stay, key=lambda host: self._workers[host].core.steps)
        self._lost.clear()
        self._tasks.clear()
        self.hosts = tuple(sorted([*stay, *joined]))
        steps = self._workers[furthest].core.steps
        self._learners.change(self.hosts, joined, furthest)
        if self._recovery_s:
            self.clock.run(until=self.clock.sleep(self._recovery_s).done)
        self._world, self._workers = self._assemble(steps)
        for host, worker in self._workers.items():
            worker.take_over(saved.get(host), saved[furthest])
        self.happened.append(f"{self.clock.now_s:.3f} s: {len(self.hosts)} workers go on")

    def _assemble(self, after: int | None = None) -> tuple[LocalWorld, dict[int, VirtualWorker]]:
        acting = sorted(self._num_alike)
        world = virtual_world(self.clock, self._network, self.hosts, acting=acting)
        stage = Stage(self.clock, self._model, self._stepped)
        workers = {}
        for rank in acting or range(len(self.hosts)):
            host = self.hosts[rank]
            ends = (world.lane(rank), self._learners.of(host), self._paces[host])
            workers[host] = VirtualWorker(self.strategy, *ends, stage, after=after)
        return world, workers
