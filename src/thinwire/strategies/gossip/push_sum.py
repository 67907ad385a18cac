"""asynchronous=True: nobody waits for a late peer. Push-sum over messages from whoever sends.

Every worker holds values z and a mass w, which begins as 1. To send is to give half of the mass away with a
copy of the values: a message is (z, w/2) and w/2 stays. To receive (z', v) is

    z += v / (w + v) * (z' - z);  w += v

so the sum of w z, and that of w, over workers and messages under way, never change, whoever sends to whom
and however late. If the payload shows z as q, then w/2 q has left, and what stays is 2 z - q with mass w/2.
Where only a share of the model is sent, every cell of it has a mass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.strategies.base import Parameters
from thinwire.strategies.gossip.cells import Cells
from thinwire.strategies.gossip.letter import Layout
from thinwire.strategies.gossip.mail import Arrival, Mail, announce, goodbye, head_tag, mail_of, numbers
from thinwire.strategies.gossip.state import SAMPLE_EVERY, GossipState, Turn
from thinwire.wire.base import Wire, Work, all_of, land, take_off

if TYPE_CHECKING:
    from torch import Tensor

LEAST_MASS = 1 / 16
"""A worker with less keeps it until it hears from others: its own steps would soon count for nothing."""


# -- sending ----------------------------------------------------------------------------------------


async def push(bucket: Parameters, state: GossipState, wire: Wire) -> None:
    """Send a bucket's part of the round's message, and fold in what has come when the next step does."""
    mail = mail_of(state)
    if bucket.index == 0:
        _begin(state, mail, wire)
    turn, values = state.turn, state.values(bucket)
    await take_off()
    kept = _send(bucket, values, turn, state, wire) if turn and bucket.index in turn.window.spans else []
    await land()
    for value, rest in zip(values, kept, strict=False):  # nothing is kept of what was sent as it is
        value.add_(rest)
    if bucket.index == 0:
        _take_arrived(state, mail)
    fold(bucket, state, mail)


def _send(
    bucket: Parameters, values: Sequence[Parameters], turn: Turn, state: GossipState, wire: Wire
) -> list[Tensor]:
    """Send a bucket's part; what of each value the payload could not show, for the whole bucket."""
    from thinwire.compress.payload import on_host

    flats = [value.read() for value in values]  # nothing changes them before this has landed
    spans, momenta = turn.window.spans[bucket.index], state.fixed.momenta
    layout = Layout(spans, flats[0].element_size(), turn.payload, momenta)
    message, sent = layout.write(bucket.index, flats, state.memory)
    work = wire.exchange(send=on_host(message), to=turn.peers.to, tag=bucket.index)
    mail_of(state).outgoing.append(work)
    if turn.payload == "fp32":
        return []
    rest = [
        flats[part.value][part.start : part.stop] - data
        for part, data in zip(layout.parts, sent, strict=True)
    ]
    return [layout.spread(rest, number, bucket.num_parameters) for number in range(1 + momenta)]


def _begin(state: GossipState, mail: Mail, wire: Wire) -> None:
    """Halve the masses of what is sent and send the head; or skip the round, if the last still goes on or
    there is little left to give."""
    state.steps += 1
    state.turn = None
    if not mail.listening:
        mail.listening, mail.quiet = True, Work()
        mail.awake.finish()
    for work in mail.outgoing:
        if work.error is not None:
            raise work.error
    if not all(work.done() for work in mail.outgoing):
        state.skipped_rounds += 1
        return
    place = (state.place.cell, state.num_cells)
    turn = state.next_turn(wire.rank)
    if min(state.masses[cell] for cell in turn.window.cells) < LEAST_MASS:
        state.skipped_rounds += 1
        return
    state.turn = turn
    masses = [0.0] * len(state.masses)
    for cell in turn.window.cells:
        state.masses[cell] /= 2
        masses[cell] = state.masses[cell]
    head = announce(wire.rank, state.steps, *place, turn.payload, masses)
    mail.sent[turn.peers.to] += 1
    mail.outgoing = [wire.exchange(send=head, to=turn.peers.to, tag=head_tag(mail))]


# -- folding in -------------------------------------------------------------------------------------


def _take_arrived(state: GossipState, mail: Mail) -> None:
    """What has come lands now, before the step: the masses first, which all buckets need."""
    count = len(mail.arrived)  # more may come while this runs
    mail.folding, mail.arrived[:count] = mail.arrived[:count], []
    for arrival in mail.folding:
        state.late_rounds += arrival.steps < state.steps
        arrival.weights = [0.0] * len(state.masses)
        for cell in arrival.cells:
            given = arrival.masses[cell]
            state.masses[cell] += given
            arrival.weights[cell] = given / state.masses[cell]
    if mail.norm > 0:
        state.distance = state.from_mean(mail.apart, mail.norm)
        mail.apart = mail.norm = 0.0


def fold(bucket: Parameters, state: GossipState, mail: Mail) -> None:
    """Move a bucket towards what has come for it."""
    for arrival in mail.folding:
        layout = arrival.layouts.get(bucket.index)
        if layout is None:
            continue
        if state.steps % SAMPLE_EVERY == 0:
            _sample(bucket, layout, arrival, mail)
        weight = _weight(bucket, arrival, state.fixed.cells)
        for number, value in enumerate(state.values(bucket)):
            value.lerp_(layout.spread(arrival.parts[bucket.index], number, bucket.num_parameters), weight)


def _sample(bucket: Parameters, layout: Layout, arrival: Arrival, mail: Mail) -> None:
    own = bucket.read()
    if own.is_meta:
        return  # sizes alone, without numbers
    for part, theirs in zip(layout.parts, arrival.parts[bucket.index], strict=True):
        if part.value == 0:
            mail.apart += float((theirs - own[part.start : part.stop]).square().sum())
            mail.norm += float(theirs.square().sum())


def _weight(bucket: Parameters, arrival: Arrival, cells: Cells) -> float | Tensor:
    """How far each parameter of a bucket moves: one number, if it is the same for all."""
    own = [
        (cells.cells[i], arrival.weights[i]) for i in arrival.cells if cells.cells[i].bucket == bucket.index
    ]
    whole = sum(cell.stop - cell.start for cell, _ in own) == bucket.num_parameters
    if whole and all(weight == own[0][1] for _, weight in own):
        return own[0][1]
    weights = arrival.parts[bucket.index][0].new_zeros(bucket.num_parameters)
    for cell, weight in own:
        weights[cell.start : cell.stop] = weight
    return weights


# -- pausing ----------------------------------------------------------------------------------------


async def drain(buckets: Sequence[Parameters], state: GossipState, wire: Wire) -> None:
    """Wait until every message has arrived where it was sent to, fold it in, and stop listening."""
    mail, lane = mail_of(state), state.fixed.lane
    if wire.world_size == 1 or not mail.listening:
        return
    await take_off()
    await all_of(mail.outgoing)
    sent = numbers(*mail.sent)
    expected = sent.new_empty(sent.shape)
    await lane.all_to_all(sent, expected)
    while mail.received != [int(number) for number in expected.tolist()]:
        await mail.news
    await lane.all_reduce_(numbers(0.0))  # nobody says goodbye before everyone has everything
    await wire.exchange(
        send=goodbye(len(state.masses)), to=(wire.rank + 1) % wire.world_size, tag=head_tag(mail)
    )
    await mail.quiet
    await lane.all_reduce_(numbers(0.0))  # nor goes on before everyone has heard it
    mail.listening = False
    mail.sent, mail.received = [0] * wire.world_size, [0] * wire.world_size
    await land()
    _take_arrived(state, mail)
    for bucket in buckets:
        fold(bucket, state, mail)
