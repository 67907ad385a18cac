"""Journals of made-up workers, line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.chaos.journals import Journals


class Writer:
    """One worker's journal; each line is a tenth of a second after the last one of all workers."""

    now = 1000.0

    def __init__(self, folder: Path, host: int, number: int = 0) -> None:
        self._path = folder / f"host{host}-{100 * number + host + 1}.jsonl"
        self.id = f"w{host}.{number}"
        pid = 100 * number + host + 1
        self.note("member", id=self.id, host="10.0.0.1", port=1000 + pid, pid=pid, rank=str(host))

    def note(self, what: str, **facts: Any) -> None:
        Writer.now += 0.1
        with self._path.open("a") as file:
            file.write(json.dumps({"at": Writer.now, "what": what, **facts}) + "\n")

    def trains(self, generation: int, rank: int, size: int, steps: int, **facts: Any) -> None:
        told = {"epoch": 0, "lineage": "run", "agrees": True, "done": []}
        place = {"generation": generation, "id": self.id, "rank": rank, "world_size": size, "steps": steps}
        self.note("trains", **{**told, **place, **facts})

    def step(
        self, generation: int, steps: int, indices: list[int], *, done: bool = True, epoch: int = 0
    ) -> None:
        place = {"generation": generation, "epoch": epoch, "steps": steps}
        self.note("step", **place, indices=indices)
        if done:
            self.note("done", **place)

    def epoch(self, generation: int, carried: list[int], epoch: int = 0) -> None:
        self.note("epoch", epoch=epoch, generation=generation, carried=carried, num_samples=8)


def read(folder: Path) -> Journals:
    journals = Journals(folder)
    journals.poll()
    return journals
