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


def send_order(profiles: Sequence[Profile]) -> list[tuple[int, int]]:
    """Pieces as (bucket, piece): whenever the wire is free, the first needed of those ready.

    >>> early, late = Profile(0.0, 1, (1.0, 1.0)), Profile(1.5, 0, (1.0,))
    >>> send_order([early, late])
    [(0, 0), (0, 1), (1, 0)]
    >>> send_order([early, Profile(0.5, 0, (1.0,))])
    [(0, 0), (1, 0), (0, 1)]
    """
    waiting = {(b, p) for b, profile in enumerate(profiles) for p in range(len(profile.piece_s))}
    order, now_s = [], 0.0
    while waiting:
        now_s = max(now_s, min(profiles[b].ready_s for b, _ in waiting))
        ready = [(b, p) for b, p in waiting if profiles[b].ready_s <= now_s]
        chosen = min(ready, key=lambda piece: (profiles[piece[0]].need, piece))
        waiting.remove(chosen)
        order.append(chosen)
        now_s += profiles[chosen[0]].piece_s[chosen[1]]
    return order
