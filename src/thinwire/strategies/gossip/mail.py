"""Messages of push-sum: a head that says what follows, then one message for each bucket in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from thinwire.compress.sizes import Payload
from thinwire.strategies.base import Parameters
from thinwire.strategies.gossip.cells import Place
from thinwire.strategies.gossip.letter import Layout
from thinwire.strategies.gossip.state import GossipState
from thinwire.wire.base import Wire, Work, all_of, any_of

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = 5
"""Numbers in a head before the masses of the cells: sender, its steps, first cell, cells, payload."""
_GOODBYE = -1.0
"""In place of a sender: no message follows, and nobody listens until the next step."""
_PAYLOADS: tuple[Payload, ...] = get_args(Payload)


def head_bytes(num_cells: int) -> int:
    """What a head takes on the wire."""
    return 8 * (_HEAD + num_cells)


@dataclass(slots=True)
class Arrival:
    """A message that has come and is not folded in yet."""

    source: int
    steps: int
    """Of the sender, when it sent it."""
    cells: Sequence[int]
    masses: list[float]
    layouts: dict[int, Layout]
    inboxes: dict[int, Tensor]
    parts: dict[int, list[Tensor]] = field(default_factory=dict)
    """By bucket, as they looked on the wire."""
    weights: list[float] = field(default_factory=list)
    """How far each cell moves towards it."""


class Mail:
    """What one worker has on the wire."""

    def __init__(self, buckets: Sequence[Parameters], world_size: int) -> None:
        self.likes = [bucket.read()[:1].clone() for bucket in buckets]
        """A number of each bucket, for its dtype and device."""
        self.outgoing: list[Work] = []
        self.arrived: list[Arrival] = []
        self.folding: list[Arrival] = []
        """Those that land before the coming step."""
        self.sent = [0] * world_size
        self.received = [0] * world_size
        """Messages to and from each worker since the last drain."""
        self.news = Work()
        """Ends when a message has come."""
        self.apart = self.norm = 0.0
        """Squared distance to a peer and squared size, as far as they have been looked at."""
        self.listening = True
        self.quiet = Work()
        """Ends when this worker listens no more,"""
        self.awake = Work()
        """and when it does again."""


def mail_of(state: GossipState) -> Mail:
    mail = state.fixed.mail
    assert mail is not None, "made by init where asynchronous"
    return mail


def numbers(*values: float) -> Tensor:
    """A few numbers to send."""
    from thinwire.compress.payload import plain

    return plain(values)


def announce(rank: int, steps: int, first: int, count: int, payload: Payload, masses: list[float]) -> Tensor:
    """The head of a message."""
    return numbers(rank, steps, first, count, _PAYLOADS.index(payload), *masses)


def goodbye(num_cells: int) -> Tensor:
    """A head that no message follows."""
    return numbers(_GOODBYE, *[0.0] * (_HEAD - 1 + num_cells))


def head_tag(mail: Mail) -> int:
    return len(mail.likes)  # after those of the buckets


async def serve(state: GossipState, wire: Wire) -> None:
    """Take messages from whoever sends, several at a time."""
    if wire.world_size == 1:
        return
    mail = mail_of(state)
    head = goodbye(len(state.masses))
    heads = wire.exchange(recv=head, tag=head_tag(mail))
    coming: list[tuple[Arrival, Work]] = []
    while True:
        works = [heads, *(work for _, work in coming)]
        first = await any_of(works)
        await works[first]  # which raises its error
        if first > 0:
            _complete(coming.pop(first - 1)[0], state, mail)
            continue
        values = head.tolist()
        if values[0] == _GOODBYE:
            mail.awake = Work()
            mail.quiet.finish()
            await mail.awake
        else:
            coming.append(_open(values, state, mail, wire))
        heads = wire.exchange(recv=head, tag=head_tag(mail))


def _open(values: list[float], state: GossipState, mail: Mail, wire: Wire) -> tuple[Arrival, Work]:
    """Make room for a message that is announced, and ask for it."""
    source, steps, first, count, payload = (int(number) for number in values[:_HEAD])
    window = state.fixed.cells.window(Place(first), count)
    momenta, likes = state.fixed.momenta, mail.likes
    layouts = {
        bucket: Layout(spans, likes[bucket].element_size(), _PAYLOADS[payload], momenta)
        for bucket, spans in window.spans.items()
    }
    inboxes = {bucket: _inbox(layout.num_bytes, likes[bucket]) for bucket, layout in layouts.items()}
    works = [wire.exchange(recv=inbox, source=source, tag=bucket) for bucket, inbox in inboxes.items()]
    return Arrival(source, steps, window.cells, values[_HEAD:], layouts, inboxes), all_of(works)


def _inbox(num_bytes: int, like: Tensor) -> Tensor:
    from thinwire.compress.payload import empty_message, on_host

    return empty_message(num_bytes, on_host(like))


def _complete(arrival: Arrival, state: GossipState, mail: Mail) -> None:
    for bucket, layout in arrival.layouts.items():
        like = mail.likes[bucket]
        likes = [like.expand(part.stop - part.start) for part in layout.parts]
        inbox = arrival.inboxes[bucket].to(like.device)
        arrival.parts[bucket] = layout.read(bucket, inbox, likes, state.memory)
    arrival.inboxes.clear()
    mail.arrived.append(arrival)
    mail.received[arrival.source] += 1
    news, mail.news = mail.news, Work()
    news.finish()
