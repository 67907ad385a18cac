"""When each worker was last heard of, here or by way of others, and who has been silent for too long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from thinwire.elastic.roster import Roster
from thinwire.wire.patience import BEAT_S, Patience

_JOIN_S = 3.0
"""Who has asked to join is forgotten unless it asks again."""


class FailureDetector:
    """When others were heard of, by name, on this worker's clock."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._heard_s: dict[str, float] = {}
        self._vouched: dict[str, tuple[float, str]] = {}
        """When somebody has last said that it hears a worker, and who."""
        self._asked_s: dict[str, float] = {}
        """When somebody has asked to join."""

    def note(self, id_: str, now_s: float) -> None:
        """A worker was heard of."""
        self._heard_s[id_] = now_s

    def expect(self, ids: Collection[str], now_s: float, *, connected: Iterable[str] = ()) -> None:
        """Give these workers from now on all the time there is; forget whoever is neither one of them nor
        connected."""
        kept = {*ids, *connected}
        times: tuple[dict[str, Any], ...] = (self._heard_s, self._vouched, self._asked_s)
        for known in times:
            for id_ in known.keys() - kept:
                del known[id_]
        for id_ in ids:
            self._heard_s[id_] = max(now_s, self._heard_s.get(id_, 0.0))

    def heard_within(self, id_: str, seconds: float, now_s: float) -> bool:
        return now_s - self._heard_s.get(id_, 0.0) < seconds

    def note_vouching(self, id_: str, by: str, now_s: float) -> None:
        """Another worker says that it hears this one."""
        self._vouched[id_] = now_s, by

    def relay_to(self, id_: str, now_s: float) -> str:
        """Who has lately heard a worker and may pass a message on; mostly nobody."""
        vouched_s, by = self._vouched.get(id_, (0.0, ""))
        return by if now_s - vouched_s < self._patience.silence_s else ""

    def judge(self, roster: Roster, now_s: float) -> list[str]:
        """Tell the roster of members that were silent for too long; returns those to ask the others for."""
        quiet = []
        for id_ in [] if roster.membership is None else roster.membership.ids:
            quiet_s = now_s - self._heard_s.setdefault(id_, now_s)
            if id_ == roster.me.id or id_ in roster.knowledge.dead or quiet_s < self._patience.ask_s:
                continue
            quiet.append(id_)
            if quiet_s > self._patience.silence_s:
                vouched_s, _ = self._vouched.get(id_, (0.0, ""))
                roster.notice_silence(id_, others_hear=now_s - vouched_s < 3 * BEAT_S)
        return quiet

    def note_joiner(self, id_: str, now_s: float) -> None:
        """A worker has asked to join, which it does again and again."""
        self._asked_s[id_] = now_s

    def forget_joiners(self, roster: Roster, now_s: float) -> None:
        for id_ in list(roster.knowledge.joining):
            if now_s > self._asked_s.get(id_, 0.0) + _JOIN_S:
                del roster.knowledge.joining[id_]
