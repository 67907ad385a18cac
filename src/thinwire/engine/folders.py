"""The folders of a run's checkpoints: which one counts, how one becomes whole, what is swept away.

    step-00000120/            whole, because it has this name
        manifest.json         what it is of, and the digest of every file
        common/               what all workers share, written by rank 0
        worker-0/  worker-1/  what each has of its own
    step-00000150.saving-3f9a1c/

A folder gets its name by one rename, after everything in it has reached the disk. So a kill at any moment
leaves the last whole one, and something with a dot in its name that the next start removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.engine import dcp
from thinwire.engine.link import Link
from thinwire.errors import DataError

COMMON = "common"
_MANIFEST = "manifest.json"
_DIGESTS = "digests.json"
_FORMAT = 1
_WHOLE = re.compile(r"step-\d{8,}")
_POLL_S = 0.02
_MOST_NAMED = 3
"""Differences that an error names; more are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What one checkpoint says of itself."""

    format: int
    step: int
    world_size: int
    """Workers that saved it."""
    about: Mapping[str, str]
    """What a run must have in common with it to go on from it."""
    digests: Mapping[str, Mapping[str, str]]
    """Of the files of each part, by part and name."""


def worker(rank: int) -> str:
    """The part of one worker."""
    return f"worker-{rank}"


def whole(folder: Path) -> list[Path]:
    """The checkpoints that are whole, oldest first."""
    found = [path for path in folder.glob("step-*") if _WHOLE.fullmatch(path.name)] if folder.exists() else []
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def sweep(folder: Path) -> None:
    """Remove what a killed run has left half saved or half removed."""
    for path in folder.glob("step-*.*"):
        shutil.rmtree(path, ignore_errors=True)


# -- reading --------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself; DataError if it cannot be understood."""
    try:
        content = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        version = content["format"]
        if version == _FORMAT:
            return Manifest(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{_MANIFEST} cannot be read ({error})") from error
    raise DataError(
        f"{path} has format {version}, and this version of thinwire reads format {_FORMAT}",
        hint="go on with the version of thinwire that saved it",
    )


def compare(path: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise DataError, naming what differs between the training that was saved and this one."""
    differ = [
        f"{key} was {saved.get(key, 'not there')}, here it is {here.get(key, 'not there')}"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]
    if differ:
        more = f"; and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
        raise DataError(
            f"{path} is of another training: {'; '.join(differ[:_MOST_NAMED])}{more}",
            hint="resume with what it was started with, or start a new run in another folder",
        )


def verify(path: Path, manifest: Manifest, part: str) -> None:
    """Raise DataError unless every file of a part is as it was written."""
    noted = manifest.digests.get(part, {})
    if not noted:
        raise damaged(path, f"{_MANIFEST} does not mention {part}")
    for name in noted:
        if not (path / part / name).exists():
            raise damaged(path, f"{part}/{name} is missing")
    found = dcp.digests(path / part)
    for name, digest in noted.items():
        if found[name] != digest:
            raise damaged(path, f"{part}/{name} is not as it was written")


def damaged(path: Path, what: str) -> DataError:
    """The error for a checkpoint that cannot be used, with what to do about it."""
    others = [other.name for other in whole(path.parent) if other != path]
    instead = f"to go on from {others[-1]}" if others else "to start again"
    return DataError(f"{path} is damaged: {what}", hint=f"remove or repair that folder {instead}")


# -- writing --------------------------------------------------------------------------------------


class Saver:
    """Writes one snapshot at a time, in a thread of its own.

    Workers meet in the file system alone: no collective of this thread can mix with those of training.
    """

    def __init__(self, folder: Path, link: Link, about: Mapping[str, str], *, nonce: str, keep: int) -> None:
        self._folder, self._link, self._about = folder, link, about
        self._nonce, self._keep = nonce, keep
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
        # The nonce keeps the parts of a dying predecessor out of it.
        place = self._folder / f"step-{step:08d}.saving-{self._nonce}"
        mine = worker(self._link.rank)
        try:
            _add_part(place, mine, own)
            if common is not None:
                _add_part(place, COMMON, common)
                self._commit(place, step)
        except Exception as error:  # noqa: BLE001  # told by `wait`: training outlives a full disk
            self._failure = f"the checkpoint of step {step} was not saved: {error}"
            if common is not None:
                shutil.rmtree(place, ignore_errors=True)
                return
            with contextlib.suppress(OSError):  # then rank 0 finds out when its patience ends
                (place / f"{mine}.failed").mkdir(parents=True, exist_ok=True)

    def _commit(self, place: Path, step: int) -> None:
        """Rank 0 makes the checkpoint count once everybody's part is there, and removes old ones."""
        parts = [COMMON, *map(worker, range(self._link.world_size))]
        self._wait_for_parts(place, parts)
        digests = {part: json.loads((place / part / _DIGESTS).read_text(encoding="utf-8")) for part in parts}
        manifest = Manifest(
            format=_FORMAT, step=step, world_size=self._link.world_size, about=self._about, digests=digests
        )
        _write_json(place / _MANIFEST, asdict(manifest))
        dcp.sync_folder(place)
        target = self._folder / f"step-{step:08d}"
        if target.exists():  # of a run that has been gone back from
            _remove(target)
        place.rename(target)
        dcp.sync_folder(self._folder)
        for old in whole(self._folder)[: -self._keep]:
            _remove(old)

    def _wait_for_parts(self, place: Path, parts: list[str]) -> None:
        """Return when all parts are whole; DataError if one fails, never comes, or is no longer wanted."""
        timeout_s = self._link.timeout_s
        deadline = time.monotonic() + timeout_s
        while missing := [part for part in parts if not (place / part).exists()]:
            failed = [part for part in missing if (place / f"{part}.failed").exists()]
            if failed:
                raise DataError(f"{failed[0]} could not write its part")
            if self._stop.is_set():
                raise DataError(f"training ended before {missing[0]} had written its part")
            if time.monotonic() > deadline:
                raise DataError(f"{missing[0]} has not written its part after {timeout_s:g} s")
            time.sleep(_POLL_S)


def _add_part(place: Path, part: str, taken: dict[str, Any]) -> None:
    """Write a part; it is there under its name once it is whole."""
    place.mkdir(parents=True, exist_ok=True)
    unfinished = place / f"{part}.unfinished"
    dcp.write(unfinished, taken)
    _write_json(unfinished / _DIGESTS, dcp.digests(unfinished))
    dcp.sync_folder(unfinished)
    unfinished.rename(place / part)
    dcp.sync_folder(place)


def _remove(path: Path) -> None:
    """Take the name away first: half a folder must never look whole."""
    removing = path.with_name(f"{path.name}.removing")
    path.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
