from __future__ import annotations

import numpy as np
import pytest

from thinwire.simulate.deal import Cut, Deal, in_streams, in_turn


@pytest.mark.parametrize("cut", [in_turn, in_streams])
def test_nobody_comes_and_nobody_goes(cut: Cut) -> None:
    deal = Deal(12, cut(np.arange(12), 3, 2), 2, cut)
    for rank in range(3):
        while deal.draw(rank) is not None:
            deal.trained(rank)
    assert deal.account() == "12 samples: 12 trained once, 0 more often, 0 never"


@pytest.mark.parametrize("after", [2, 4])
def test_what_was_drawn_and_not_trained_is_dealt_again(after: int) -> None:
    deal = Deal(24, in_turn(np.arange(24), 3, 2), 2, in_turn)
    for rank in range(3):
        deal.draw(rank)
        deal.trained(rank)
    deal.draw(0)
    deal.draw(1)
    deal.again(after)
    for rank in range(after):
        while deal.draw(rank) is not None:
            deal.trained(rank)
    never = 18 % after
    trained = f"24 samples: {24 - never} trained once, 0 more often, {never} never"
    assert deal.account() == f"{trained}, 4 dealt again after a loss"


@pytest.mark.parametrize("cut", [in_turn, in_streams])
def test_however_often_workers_change_only_the_last_rest_is_left_out(cut: Cut) -> None:
    deal = Deal(1437, cut(np.arange(1437), 1, 1), 1, cut)
    for num_workers in (5, 4, 7, 3, 5, 2, 6, 4):
        deal.again(num_workers)
        for rank in range(num_workers):
            deal.draw(rank)
            deal.trained(rank)
    while deal.draw(0) is not None:
        for rank in range(4):
            if rank:
                deal.draw(rank)
            deal.trained(rank)
    never = (1437 - (5 + 4 + 7 + 3 + 5 + 2 + 6)) % 4
    assert deal.account() == f"1437 samples: {1437 - never} trained once, 0 more often, {never} never"


def test_streams_stay_contiguous_after_a_change() -> None:
    deal = Deal(12, in_streams(np.arange(12), 2, 1), 1, in_streams)
    for rank in range(2):
        deal.draw(rank)
        deal.trained(rank)
    deal.again(1)
    read = []
    while (batch := deal.draw(0)) is not None:
        read += batch.tolist()
        deal.trained(0)
    assert read == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
