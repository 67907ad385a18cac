"""The running parts of a link: they act around every step, survive a change of workers, and end together.

`Link` is what a user calls; everything that happens without being called is here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.engine import exits
from thinwire.engine.attachment import Attachment
from thinwire.engine.caller import Caller
from thinwire.engine.common_calls import CommonCalls
from thinwire.engine.companion import Companion
from thinwire.engine.core import Core, Stats
from thinwire.engine.leaves import Kept
from thinwire.engine.regroup import Place, Regrouper, digest_of
from thinwire.engine.side_lanes import SideLanes
from thinwire.engine.split_state import join_strips
from thinwire.engine.transport import Transport
from thinwire.errors import PeerError, PeerLost
from thinwire.wire.base import Lane

_log = logging.getLogger(__name__)


class LinkRuntime:
    """One worker's core and transport, the hooks on its model, and its side lanes."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        rebuild: Callable[[Core], None],
        *,
        advises: bool = True,
        regrouper: Regrouper | None = None,
    ) -> None:
        """`rebuild` cuts the model into buckets anew; `advises`: warn at the end if the steps were too few
        for the strategy; `regrouper`: of an elastic link, finds the workers to go on with."""
        self.strategy, self.model, self.optimizers = core.strategy, core.model, core.optimizers
        self.timeout_s = transport.timeout_s
        self.regrouper = regrouper
        self.companion: Companion | None = None
        self.side_lanes = SideLanes()
        self.caller = Caller(
            CommonCalls() if regrouper is None else regrouper.calls,
            finish_others=self.side_lanes.finish,
            regroup=None if regrouper is None else self.regroup,
        )
        self.on_generation: Callable[[Core], None] = lambda core: None
        """Called with the new core when the workers have changed."""
        self.attached = True
        self._rebuild, self._advises = rebuild, advises and core.lane.world_size > 1
        self._past = Stats()
        """What was counted in generations before this one."""
        self._enter(core, transport)
        self._attachment = Attachment(core, transport, before=self._before_step, after=self._after_step)
        core.serve()
        exits.remember(self._at_exit)

    def _enter(self, core: Core, transport: Transport) -> None:
        self.core, self.transport = core, transport
        self.caller.enter(core, transport)

    @property
    def lane(self) -> Lane:
        return self.core.lane

    @property
    def stats(self) -> Stats:
        """Steps, traffic and waiting so far, over all generations."""
        past, now = self._past, self.core.stats
        extra = {} if self.companion is None else self.companion.instruments()
        return replace(
            now,
            rounds=past.rounds + now.rounds,
            traffic=past.traffic + now.traffic,
            exposed_s=past.exposed_s + now.exposed_s,
            instruments={**now.instruments, **extra},
        )

    # -- around a step ----------------------------------------------------------------------------

    def _before_step(self) -> None:
        if (lost := self.lane.lost) is not None:  # a strategy that waits for nobody would train on alone
            raise lost
        self.transport.wait_for(self.core.before_step())

    def _after_step(self) -> None:
        try:
            self.transport.wait_for(self.core.after_step())
        except PeerLost:
            if self.regrouper is None:
                raise
            self.core.steps += 1  # the step is made; mixing is given up, and `Step` regroups
        self.transport.passes = 0
        self.transport.set_status()
        if self.companion is not None:
            self.companion.stepped()

    # -- a model or workers that change -----------------------------------------------------------

    def reshape(
        self, kept: Kept, change: Callable[[], None], move: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Go on with parameters that `change` makes smaller."""
        self.caller.synchronize()
        self._reassemble(change, self.core.shrunken_state(kept, move))

    def restore(self, saved: dict[str, Any], change: Callable[[], None]) -> None:
        """Go on with parameters whose earlier shapes `change` brings back."""
        self.caller.synchronize()
        self._reassemble(change, {**saved, "steps": self.core.steps})

    def _reassemble(self, change: Callable[[], None], saved: dict[str, Any]) -> None:
        self.core.reducer.unhook()
        change()
        self.core.buffers.forget()
        self._rebuild(self.core)
        self._attachment.hook(self.core, self.transport)
        self.core.load([saved] * self.lane.world_size)

    def regroup(self) -> None:
        """Go on with the workers that are left or have come, from the last step that was completed."""
        regrouper, core = self.regrouper, self.core
        assert regrouper is not None, "only an elastic link regroups"
        known = regrouper.world.known_steps
        core.reducer.unhook()
        self._past = self.stats
        regrouper.end(core, self.transport, PeerLost("this worker goes on with others"))
        place = Place.of(core)
        known[core.lane.rank] = core.steps
        for parameter in self.model.parameters():
            parameter.grad = None
        self._enter(*regrouper.form(place, known))
        self.on_generation(self.core)
        self._attachment.hook(self.core, self.transport)
        self.core.serve()

    # -- ending -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Finish what is under way together with all workers, and end; a second call does nothing."""
        if not self.attached:
            return
        failure = sys.exception()  # in a `finally`, what it is about must not be hidden behind our waiting
        self.transport.leave(failure)
        try:
            self.caller.finish()
            self._warn_if_short()
            if self.regrouper is not None:
                # whoever is lost now must not leave some with another mean than others
                self.caller.meet("the end")
                self._note_end(self.regrouper)
                self.regrouper.world.finish()
            self.transport.wait_for(self.core.leaving())
            join_strips(self.core, self.transport.wait)
            # nobody closes its connections while others still talk
            self.caller.everyone.meet("link.detach")
        except PeerError:
            if failure is None and self.regrouper is None:  # of an elastic world, others may leave first
                raise
        except BaseException as error:
            self.transport.tell_error(failure or error)
            raise
        finally:
            self._unhook()
            self._stop()

    def fail(self, error: BaseException) -> None:
        """End at once with this error of the user's training, and tell the others of it."""
        if self.attached:
            self._unhook()
            self.transport.tell_error(error)
            self._stop()

    def _at_exit(self) -> None:
        """The script has ended without `detach`: do it now, or tell the others of the error it ended with."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.fail(error)
        else:
            self.detach()

    def _warn_if_short(self) -> None:
        """Warn if these were too few steps for the strategy, unless `attach` has said so."""
        lane = self.lane
        told, advice = (self.strategy.advice(n, lane.world_size) for n in (None, self.core.steps))
        if self._advises and lane.rank == 0 and advice not in ("", told):
            _log.warning(advice)

    def _note_end(self, regrouper: Regrouper) -> None:
        journal, model = regrouper.world.journal, self.model
        if journal.is_open:
            journal.note("ended", generation=regrouper.synced, steps=self.core.steps, model=digest_of(model))

    def _unhook(self) -> None:
        self.attached = False
        if self.companion is not None:
            self.companion.leave()
        self._attachment.unhook()

    def _stop(self) -> None:
        self.side_lanes.stop()
        self.transport.stop()
        self.core.abandon()
        if self.regrouper is not None:
            self.regrouper.world.close()
        else:
            self.lane.close()
