"""The synchronous rounds: swap with a peer, or take the mean of all."""

from __future__ import annotations

from thinwire.strategies.base import Parameters
from thinwire.strategies.gossip.letter import Layout
from thinwire.strategies.gossip.state import GossipState, Turn
from thinwire.wire.base import Wire, land, take_off


async def swap(bucket: Parameters, state: GossipState, turn: Turn, wire: Wire) -> None:
    """Send the window's part of a bucket to one peer and move half way towards what another has sent.

    Half the difference of what was received and what was sent, both as they looked on the wire: what one
    worker gains another loses, so the mean stays whatever the payload has rounded away.
    """
    spans = turn.window.spans.get(bucket.index)
    if spans is None:
        return
    values = state.values(bucket)
    await take_off()
    flats = [value.read() for value in values]  # nothing changes them before this has landed
    layout = Layout(spans, flats[0].element_size(), turn.payload, len(values) - 1)
    message, sent = layout.write(bucket.index, flats, state.memory)
    inbox = message.new_empty(message.shape)
    to, source = turn.peers
    await wire.exchange(send=message, to=to, recv=inbox, source=source, tag=bucket.index)
    gauge = state.fixed.gauge
    gauge.arrived(wire.now(), layout.num_bytes)
    received = layout.read(bucket.index, inbox, sent, state.memory)
    changes = [theirs - ours for theirs, ours in zip(received, sent, strict=True)]
    state.sample(turn, changes[: len(spans)], sent[: len(spans)])
    steps = [layout.spread(changes, number, bucket.num_parameters) for number in range(len(values))]
    waited_s = await land()
    for value, step in zip(values, steps, strict=True):
        value.add_(step, scale=0.5)
    gauge.waited(waited_s)
    if state.landed(turn, waited_s):
        gauge.end(wire.now())


async def average(bucket: Parameters, state: GossipState) -> None:
    """Overwrite a bucket with the mean of all workers, which becomes the reference they have in common."""
    lane, values = state.fixed.lane, state.values(bucket)
    means = [value.read() for value in values]
    await take_off()
    for work in [lane.all_reduce_(mean) for mean in means]:
        await work
    for mean in means:
        mean.div_(lane.world_size)
    await land()
    for value, mean in zip(values, means, strict=True):
        value.write_(mean)
    if state.memory.references:
        state.memory.references[bucket.index].copy_(means[0])
    if state.memory.errors:
        state.memory.errors[bucket.index].zero_()
