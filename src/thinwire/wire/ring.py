"""A reduce-scatter around a ring of point-to-point messages, for a backend whose own sends too much.

The part of each worker starts at its right neighbour and goes once around: whoever gets it adds its own
numbers and passes it on. Every worker sends to one and receives from one all the time. An all-to-all with a
sum sends the same bytes, but several workers then send to one at once: on shaped paths of 1 Gbit/s it took
1.4 to 3.0 times the time of its bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.wire.waiters import Wait

RING_BYTES = 1 << 16
"""Smaller messages go directly: their cost is the number of hops, and not the rate."""
_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 20
"""First tag of rings, and how many they have; tags of exchanges are counted from 0."""


def ring_reduce_scatter(
    backend: Any, number: int, rank: int, world_size: int, data: Tensor, out: Tensor
) -> Wait:
    """Start collective `number` of a lane; the result goes around the ring, in the thread that calls it.

    All receives are posted here, before anything is sent: Gloo has one direction wait for the other if not,
    and two workers that both send a large message first would wait for each other. `data` is not changed.
    """
    tag = _FIRST_TAG + number % _NUM_TAGS
    own = data.detach().view(world_size, -1)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    inboxes = torch.empty_like(own[1:])
    receives = [backend.recv([inbox], left, tag) for inbox in inboxes]

    def go_around() -> None:
        sends = [backend.send([own[left]], right, tag)]
        for hop, (inbox, receive) in enumerate(zip(inboxes, receives, strict=True)):
            receive.wait()
            part = own[(rank - 2 - hop) % world_size]
            if hop == world_size - 2:
                torch.add(inbox, part, out=out.view(-1))
            else:
                sends.append(backend.send([inbox.add_(part)], right, tag))
        for send in sends:
            send.wait()

    return go_around
