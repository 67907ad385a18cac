"""Writes checkpoints beside training, and makes each count by one rename."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from thinwire.engine import folders, tensors
from thinwire.engine.folders import COMMON, FORMAT, MANIFEST, Manifest
from thinwire.engine.link import Link
from thinwire.engine.tensors import TreeSnapshot
from thinwire.errors import DataError
from thinwire.files import sync_folder

_POLL_S = 0.02


class Saver:
    """Writes one snapshot at a time, in a thread of its own.

    Workers meet in the file system alone: no collective of this thread can mix with those of training.
    """

    def __init__(self, folder: Path, link: Link, *, nonce: str, keep: int) -> None:
        self._folder, self._link = folder, link
        self._about: Mapping[str, str] = {}
        self._nonce, self._keep = nonce, keep
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure = ""

    def start(
        self, step: int, own: TreeSnapshot, common: TreeSnapshot | None, about: Mapping[str, str]
    ) -> None:
        """Begin to write, with what the training is about; `wait` must have been called after the last
        time."""
        assert self._thread is None, "one snapshot at a time"
        self._about = about
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

    def _save(self, step: int, own: TreeSnapshot, common: TreeSnapshot | None) -> None:
        # The nonce keeps the files of a dying predecessor out of it.
        place = self._folder / f"step-{step:08d}.saving-{self._nonce}"
        mine = folders.worker(self._link.rank)
        try:
            place.mkdir(parents=True, exist_ok=True)
            _add_file(place / mine, own)
            if common is not None:
                _add_file(place / COMMON, common)
                self._commit(place, step)
        except Exception as error:  # noqa: BLE001  # told by `wait`: training outlives a full disk
            self._failure = f"the checkpoint of step {step} was not saved: {error}"
            if common is not None:
                shutil.rmtree(place, ignore_errors=True)
                return
            # if it cannot be told, rank 0 finds out when its patience ends; a folder that is gone, rank 0
            # has removed, and nobody else would remove it again
            with contextlib.suppress(OSError):
                _failed(place / mine).mkdir(exist_ok=True)

    def _commit(self, place: Path, step: int) -> None:
        """Rank 0 makes the checkpoint count once everybody's file is there, and removes old ones."""
        world_size = self._link.world_size
        names = [COMMON, *map(folders.worker, range(world_size))]
        self._wait_for_files(place, names)
        files = {name: json.loads(_facts(place / name).read_text(encoding="utf-8")) for name in names}
        manifest = Manifest(format=FORMAT, step=step, world_size=world_size, about=self._about, files=files)
        _write(place / MANIFEST, folders.as_text(manifest))
        for name in names:
            _facts(place / name).unlink()
        sync_folder(place)
        target = self._folder / f"step-{step:08d}"
        if target.is_dir():  # of a run that has been gone back from
            _remove(target)
        place.rename(target)
        sync_folder(self._folder)
        for old in folders.whole(self._folder)[: -self._keep]:
            _remove(old)

    def _wait_for_files(self, place: Path, names: list[str]) -> None:
        """Return when all files are whole; DataError if one fails, never comes, or is no longer wanted."""
        timeout_s = self._link.timeout_s
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in names if not _facts(place / name).exists()]:
            failed = [name for name in missing if _failed(place / name).exists()]
            if failed:
                raise DataError(f"{failed[0]} could not be written by its worker")
            if self._stop.is_set():
                raise DataError(f"training ended before {missing[0]} was written")
            if (lost := self._link.lost) is not None:
                raise DataError(f"{missing[0]} was not written: {lost}")
            if time.monotonic() > deadline:
                raise DataError(f"{missing[0]} was not written within {timeout_s:g} s")
            time.sleep(_POLL_S)


def _facts(path: Path) -> Path:
    """Tells rank 0 that a file is whole, with its size and digest."""
    return path.with_name(f"{path.name}.json")


def _failed(path: Path) -> Path:
    """Tells rank 0 that a file will not come; a folder, because the disk may be full."""
    return path.with_name(f"{path.name}.failed")


def _add_file(path: Path, taken: TreeSnapshot) -> None:
    """The last thing it does is to tell rank 0, which may then rename the folder at any moment."""
    facts, unfinished = tensors.write(path, taken), path.with_name(f"{path.name}.unfinished")
    _write(unfinished, json.dumps(facts).encode())
    sync_folder(path.parent)
    unfinished.rename(_facts(path))


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Take the name away first: half a folder must never look whole."""
    removing = path.with_name(f"{path.name}.removing")
    path.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)
