"""The shuffle ring on the virtual clock: who trains on which samples, and what they cost to bring there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.data.rows import Rows
from thinwire.data.trips import Start, Trips
from thinwire.errors import SettingError
from thinwire.hosts.faults import Fault
from thinwire.recipes.base import Data
from thinwire.recipes.held import block_of, tensors_of
from thinwire.wire.base import Wire, Work

NUMBER_BYTES = 8


class VirtualRing:
    """One worker's end of it. Of each sample only its number travels, in as many bytes as the sample has."""

    def __init__(self, data: Data, seed: int, wire: Wire, start: Start) -> None:
        blocks = [block_of(data, rank, wire.world_size) for rank in range(wire.world_size)]
        own = blocks[wire.rank]
        num_bytes = sum(tensor[0].nbytes for tensor in tensors_of(data.train).values())
        self._rows = torch.zeros(len(own), max(NUMBER_BYTES, num_bytes), dtype=torch.uint8)
        self._rows[:, :NUMBER_BYTES] = torch.tensor(own).unsqueeze(1).view(torch.uint8)
        counts = [len(block) for block in blocks]
        self._trips = Trips(Rows([self._rows]), counts, seed=seed, uneven=False, wire=wire, start=start)

    def __len__(self) -> int:
        """Samples left in this epoch."""
        return len(self._trips)

    def begin(self, epoch: int) -> None:
        self._trips.begin(epoch)

    def fetching(self, batch_size: int) -> Iterator[Work]:
        """Send samples of later batches on their way, and wait for those of the next one."""
        return self._trips.fetching(batch_size)

    def settling(self) -> Iterator[Work]:
        """Wait until everything under way has arrived."""
        return self._trips.settling()

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """The numbers of the samples of the next batch, which has been fetched."""
        places = torch.from_numpy(self._trips.hand_out(batch_size))
        numbers: NDArray[np.int64] = self._rows[places, :NUMBER_BYTES].view(torch.int64).squeeze(1).numpy()
        return numbers


def check_changes(shuffle: str, faults: Sequence[Fault]) -> None:
    """Refuse losses of workers that hold samples nobody else has."""
    changes = [fault for fault in faults if fault.kind in ("kill", "rejoin")]
    if changes and shuffle != "dealt":
        raise SettingError(
            f"shuffle must be 'dealt' where workers are lost or join, got {shuffle!r} with {changes[0]}",
            hint="what a worker holds is lost with it; a checkpoint brings it back, which is not simulated",
        )
