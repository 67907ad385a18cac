"""In which order pieces of gradients go out when the next forward is what waits for them; no torch.

A piece can go out once backward has filled its bucket, and is waited for when forward reaches it. So
of the pieces that are ready the first needed goes first; since all workers must send in the same
order, that order is computed from one worker's times, and kept until they agree on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """What one worker has seen of a bucket."""

    ready_s: float
    """When backward fills it, from the start of backward."""
    need: int
    """Its place in the order in which forward needs buckets."""
    piece_s: tuple[float, ...]
    """How long each of its pieces takes on the wire."""


LOOK_AHEAD = (0.0, 1 / 16, 1 / 8, 1 / 4)
"""Waits for a piece that is needed earlier than those ready, in times of an average piece."""


def send_order(profiles: Sequence[Profile]) -> list[tuple[int, int]]:
    """Pieces as (bucket, piece): whenever the wire is free, the first needed of those ready, or ready soon.

    Of a few ways to look ahead, the one with which the next forward would end first.

    >>> early, late = Profile(0.0, 1, (1.0, 1.0)), Profile(1.5, 0, (1.0,))
    >>> send_order([early, late])
    [(0, 0), (0, 1), (1, 0)]
    >>> send_order([early, Profile(0.5, 0, (1.0,))])
    [(0, 0), (1, 0), (0, 1)]
    """
    pieces = [piece_s for profile in profiles for piece_s in profile.piece_s]
    average_s = sum(pieces) / max(1, len(pieces))
    tried = [_greedy(profiles, share * average_s) for share in LOOK_AHEAD]
    return min(tried, key=lambda found: _forward_end(profiles, found[1]))[0]


def _greedy(profiles: Sequence[Profile], wait_s: float) -> tuple[list[tuple[int, int]], list[float]]:
    """An order, and when each bucket has arrived."""
    waiting = {(b, p) for b, profile in enumerate(profiles) for p in range(len(profile.piece_s))}
    order, arrived_s, now_s = [], [0.0] * len(profiles), 0.0
    while waiting:
        now_s = max(now_s, min(profiles[b].ready_s for b, _ in waiting))
        ready = [(b, p) for b, p in waiting if profiles[b].ready_s <= now_s]
        chosen = min(ready, key=lambda piece: (profiles[piece[0]].need, piece))
        soon = [
            profiles[b].ready_s
            for b, _ in waiting
            if now_s < profiles[b].ready_s <= now_s + wait_s and profiles[b].need < profiles[chosen[0]].need
        ]
        if soon:
            now_s = min(soon)
            continue
        waiting.remove(chosen)
        order.append(chosen)
        now_s += profiles[chosen[0]].piece_s[chosen[1]]
        arrived_s[chosen[0]] = now_s
    return order, arrived_s


def _forward_end(profiles: Sequence[Profile], arrived_s: Sequence[float]) -> float:
    """When forward ends, if it takes half as long for a bucket as backward did."""
    by_ready = sorted(range(len(profiles)), key=lambda b: profiles[b].ready_s)
    filled_s = [0.0, *(profiles[b].ready_s for b in by_ready)]
    backward_s = {b: filled_s[i + 1] - filled_s[i] for i, b in enumerate(by_ready)}
    now_s = filled_s[-1]
    for bucket in sorted(range(len(profiles)), key=lambda b: profiles[b].need):
        now_s = max(now_s, arrived_s[bucket]) + backward_s[bucket] / 2
    return now_s
