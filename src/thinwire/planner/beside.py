"""A part of a plan's plays in a second process, which starts before this one has imported torch.

As a module this is that process: `python -m thinwire.planner.beside`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Self

from thinwire.hosts.machine import num_cores

if TYPE_CHECKING:
    from thinwire.planner.cluster import Cluster
    from thinwire.planner.link_work import LinkWorks
    from thinwire.planner.predict import Plays
    from thinwire.planner.workload import Workload

FEW_COUNTS = 3
"""Up to so many numbers of workers one process is as fast."""


class Beside:
    """The second process; it ends with the block, whether it was asked for its plays or not."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        texts: Sequence[str] | None,
        counts: Sequence[int],
        links: LinkWorks | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if len(counts) <= FEW_COUNTS or num_cores() < 2:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.planner.beside"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it cannot play fails again in the first process, with a message
        )
        assert self._process.stdin is not None
        pickle.dump((workload, cluster, texts, list(counts), links), self._process.stdin)
        self._process.stdin.close()

    def plays(self) -> Plays:
        """Waits for them; none if there is no second process, or it has failed."""
        if self._process is None:
            return {}
        assert self._process.stdout is not None
        answer = self._process.stdout.read()
        if self._process.wait() != 0:
            return {}
        found: Plays = pickle.loads(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            assert self._process.stdout is not None
            self._process.kill()
            self._process.stdout.close()
            self._process.wait()


def play_part(read: IO[bytes], write: IO[bytes]) -> None:
    """Play the second process's part of what it reads."""
    workload, cluster, texts, counts, links = pickle.load(read)
    from thinwire.planner.plan import asked
    from thinwire.planner.predict import Planner, parts

    planner = Planner(workload, cluster, links)
    _, own = parts(planner.pairs(asked(texts), counts))
    planner.play_all(own)
    pickle.dump(planner.plays, write)


if __name__ == "__main__":
    play_part(sys.stdin.buffer, sys.stdout.buffer)
