"""Writes checkpoints in a thread of its own.

Workers meet in the file system alone: no collective of this thread can mix with those of training.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.engine import folders
from thinwire.engine.folders import Manifest


@dataclass(frozen=True, slots=True)
class Crew:
    """Who saves together."""

    rank: int
    world_size: int
    timeout_s: float
    """How long rank 0 waits for the parts of the others."""


class Saver:
    """Saves one snapshot at a time."""

    def __init__(self, folder: Path, crew: Crew, about: Mapping[str, str], *, nonce: str, keep: int) -> None:
        self._folder = folder
        self._crew = crew
        self._about = about
        self._nonce = nonce
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure = ""

    def start(self, step: int, own: dict[str, Any], common: dict[str, Any] | None) -> None:
        """Begin to write; `wait` must have been called after the last time."""
        assert self._thread is None, "one snapshot at a time"
        self._thread = threading.Thread(
            target=self._save, args=(step, own, common), name="thinwire-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when this worker has nothing left to write; warn if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure and not self._stop.is_set():
            failure, self._failure = self._failure, ""
            warnings.warn(failure, stacklevel=4)

    def stop(self) -> None:
        """Do not wait for other workers any more: they may be gone."""
        self._stop.set()

    def _save(self, step: int, own: dict[str, Any], common: dict[str, Any] | None) -> None:
        place = folders.saving(self._folder, step, self._nonce)
        mine = folders.worker(self._crew.rank)
        try:
            folders.add_part(place, mine, own)
            if common is not None:
                folders.add_part(place, folders.COMMON, common)
                self._commit(place, step)
        except Exception as error:  # noqa: BLE001  # told by `wait`: training outlives a full disk
            self._failure = f"the checkpoint of step {step} was not saved: {error}"
            if common is None:
                folders.give_up(place, mine)
            else:
                shutil.rmtree(place, ignore_errors=True)

    def _commit(self, place: Path, step: int) -> None:
        """Rank 0 makes the checkpoint count once everybody's part is there."""
        parts = [folders.COMMON, *map(folders.worker, range(self._crew.world_size))]
        folders.wait_for_parts(place, parts, self._crew.timeout_s, self._stop)
        manifest = Manifest(
            format=folders.FORMAT,
            step=step,
            world_size=self._crew.world_size,
            about=self._about,
            digests=folders.part_digests(place, parts),
        )
        folders.commit(place, manifest, self._keep)
