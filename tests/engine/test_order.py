from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.engine.order import Profile, send_order

times = st.floats(0, 10, allow_nan=False)
profiles = st.lists(
    st.builds(Profile, times, st.integers(0, 20), st.lists(times, min_size=1, max_size=4).map(tuple))
)


@given(profiles)
def test_every_piece_goes_out_once(profiles: list[Profile]) -> None:
    order = send_order(profiles)
    assert sorted(order) == [
        (b, p) for b, profile in enumerate(profiles) for p in range(len(profile.piece_s))
    ]


@given(profiles)
def test_what_is_all_ready_goes_out_in_the_order_of_need(profiles: list[Profile]) -> None:
    ready = [Profile(0.0, p.need, p.piece_s) for p in profiles]
    needs = [ready[b].need for b, _ in send_order(ready)]
    assert needs == sorted(needs)


def forward_starts_after(order: list[tuple[int, int]], profiles: list[Profile]) -> float:
    """When the bucket forward needs first has arrived, for one wire that sends in this order."""
    now, arrived = 0.0, {}
    for bucket, piece in order:
        now = max(now, profiles[bucket].ready_s) + profiles[bucket].piece_s[piece]
        arrived[bucket] = now
    return arrived[min(range(len(profiles)), key=lambda b: profiles[b].need)]


def test_beats_first_in_first_out_where_sending_takes_as_long_as_computing() -> None:
    """Sixteen layers, last one ready first, first one needed first."""
    profiles = [Profile(0.02 * (i + 1), 15 - i, (0.03,)) for i in range(16)]
    fifo = [(i, 0) for i in range(16)]
    assert forward_starts_after(send_order(profiles), profiles) < 0.75 * forward_starts_after(fifo, profiles)
