"""A whole simulation: workers on one clock, while some slow down, are lost or join."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from thinwire.engine import state
from thinwire.engine.driver import Task
from thinwire.errors import PeerLost, UsageError, check
from thinwire.hosts.faults import Fault
from thinwire.simulate.clock import Clock
from thinwire.simulate.network import Network
from thinwire.simulate.pace import Pace
from thinwire.simulate.wire import VirtualWorld
from thinwire.simulate.worker import Learner, Stage, VirtualWorker, Ways
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic

NOTICE_S = 0.01
"""After this long the others know of a worker that was lost: a broken connection is noticed at once."""


@dataclass(frozen=True, slots=True)
class Change:
    """Who trains from now on."""

    hosts: tuple[int, ...]
    """In order of rank."""
    joined: tuple[int, ...]
    """Those of them who were not there before."""
    furthest: int
    """Of those who were, the one that has done the most steps."""


class Learners(Protocol):
    """What is trained, by host."""

    def of(self, host: int) -> Learner: ...

    def change(self, change: Change) -> None:
        """Share out what is left of this epoch anew; what was drawn and not stepped with counts as left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one host's workers have done so far."""

    steps: int = 0
    rounds: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    exposed_s: float = 0.0
    instruments: Mapping[str, float] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        return self.traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.traffic.received_bytes

    @property
    def messages(self) -> int:
        return self.traffic.messages


class Session:
    """The workers of a simulation, epoch after epoch."""

    def __init__(
        self,
        network: Network,
        strategy: Strategy,
        learners: Learners,
        ways: Ways,
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
        self._network, self._strategy, self._learners, self._ways = network, strategy, learners, ways
        self._recovery_s = recovery_s
        self._paces = [Pace(h.speed, jitter=jitter, seed=(seed, h.index)) for h in description.hosts]
        self._past = dict.fromkeys(self.hosts, Stats())
        self._lost: set[int] = set()
        self._joining: list[int] = []
        self._broken = False
        self._tasks: dict[int, Task] = {}
        self._running = 0
        self._by_step: list[Fault] = []
        speeds = [pace.speed for pace in self._paces] if ways.alike else []
        self._stand_in = {host: speeds.index(speed) for host, speed in enumerate(speeds)}
        """By host: the host of the worker that acts for its own; empty if each acts for itself."""
        self._world, self._workers = self._assemble([])
        for fault in description.faults:
            self._expect(fault)

    def stats(self, host: int) -> Stats:
        """Of the worker there, or of the one that was."""
        past = self._past[host]
        worker = self._workers.get(self._stand_in.get(host, host))
        if worker is None:
            return past
        return Stats(
            steps=worker.steps,
            rounds=past.rounds + worker.rounds,
            traffic=past.traffic + worker.traffic,
            exposed_s=past.exposed_s + worker.exposed_s,
            instruments=worker.instruments,
        )

    def stands_for(self, host: int) -> int:
        """How many workers the one there acts for, itself included."""
        return sum(other == host for other in self._stand_in.values()) or 1

    def epoch(self) -> None:
        """Train until every worker has gone through its batches."""
        again = True
        while again:
            while self._lost or self._joining:
                self._change()
            self._run()
            again = bool(self._lost or self._joining)

    def _run(self) -> None:
        self._running = len(self._workers)
        self._broken = False
        for host, worker in self._workers.items():
            worker.stop_at = self.num_steps
            self._tasks[host] = worker.train()
            self._tasks[host].when_done(self._ended)
        self.clock.run(until=lambda: self._broken or self._running == 0)
        for host, task in self._tasks.items():
            if host not in self._lost and task.error is not None and not self._broken:
                raise task.error
        if self._running and not self._broken:
            waiting = {f"worker {w.rank} waits {self._tasks[h].waits_for}" for h, w in self._workers.items()}
            raise UsageError("deadlock: " + "; ".join(sorted(waiting)[:5]))

    def _ended(self) -> None:
        self._running -= 1

    # -- what befalls them ----------------------------------------------------------------------------

    def _expect(self, fault: Fault) -> None:
        lasting = fault.kind in ("pause", "cut")
        check(
            fault.seconds is not None or not lasting,
            f"fault {fault.kind}",
            "given seconds= in a simulation",
            str(fault),
        )
        if fault.after_s is not None:
            self.clock.at(fault.after_s, partial(self._befall, fault))
        elif fault.step == 0:
            self.clock.soon(partial(self._befall, fault))
        else:
            self._by_step.append(fault)

    def _stepped(self, worker: VirtualWorker) -> None:
        """Let what was to happen at this step happen, once the worker waits again."""
        if not self._by_step:
            return
        host = self.hosts[worker.rank]
        for fault in list(self._by_step):
            concerned = fault.host == host or fault.host not in self.hosts
            if concerned and fault.step is not None and worker.steps >= fault.step:
                self._by_step.remove(fault)
                self.clock.soon(partial(self._befall, fault))

    def _befall(self, fault: Fault) -> None:
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
            pace = self._paces[host]
            pace.slow(fault.speed or 1.0)  # heal has none
            if fault.seconds is not None:
                self.clock.at(until_s, lambda: pace.slow(1.0))

    def _kill(self, host: int) -> None:
        if host not in self.hosts or host in self._lost:
            return
        self._lost.add(host)
        error = PeerLost(f"the worker on host {host} was killed at {self.clock.now_s:.3f} s", rank=host)
        self._stop(host, error)
        self.clock.at(self.clock.now_s + NOTICE_S, partial(self._break, self._world, error))

    def _break(self, world: VirtualWorld, error: PeerLost) -> None:
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
        self._joining.append(host)
        after = 1 + max(worker.steps for worker in self._workers.values())
        for worker in self._workers.values():
            worker.stop_at = after

    # -- another world ----------------------------------------------------------------------------------

    def _change(self) -> None:
        stay = [host for host in self.hosts if host not in self._lost]
        joined = [host for host in self._joining if host not in stay]
        if not stay:
            raise PeerLost("all workers were killed", hint="leave one of them alive")
        for host in self.hosts:
            self._past[host] = self.stats(host)
        saved = [state.dump(self._workers[host].state) for host in stay]
        furthest = max(stay, key=lambda host: self._workers[host].steps)
        self._lost.clear()
        self._joining.clear()
        self._tasks.clear()
        self.hosts = tuple(sorted([*stay, *joined]))
        change = Change(self.hosts, tuple(joined), furthest)
        steps = self._workers[furthest].steps
        self._learners.change(change)
        if self._recovery_s:
            over = self.clock.sleep(self._recovery_s)
            self.clock.run(until=over.done)
        self._world, self._workers = self._assemble(saved, steps)
        self.happened.append(f"{self.clock.now_s:.3f} s: {len(self.hosts)} workers go on")

    def _assemble(
        self, saved: Sequence[Any], steps: int = 0
    ) -> tuple[VirtualWorld, dict[int, VirtualWorker]]:
        acting = sorted(set(self._stand_in.values()))
        world = VirtualWorld(self.clock, self._network, self.hosts, stand_ins=acting)
        stage = Stage(self.clock, self._ways, self._stepped)
        workers = {}
        for rank in acting or range(len(self.hosts)):
            host = self.hosts[rank]
            wire, learner = world.wire(rank), self._learners.of(host)
            workers[host] = VirtualWorker(
                self._strategy, wire, learner, self._paces[host], stage, steps=steps
            )
        if saved:
            for worker in workers.values():
                worker.resume(list(saved))
        return world, workers
