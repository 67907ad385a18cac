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

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.engine import dcp
from thinwire.errors import DataError

COMMON = "common"
MANIFEST = "manifest.json"
FORMAT = 1
_DIGESTS = "digests.json"
_WHOLE = re.compile(r"step-\d{8,}")
_POLL_S = 0.02


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


def saving(folder: Path, step: int, nonce: str) -> Path:
    """Where the workers of one run put their parts; the nonce keeps a dying predecessor's out of it."""
    return folder / f"step-{step:08d}.saving-{nonce}"


def add_part(place: Path, part: str, taken: dict[str, Any]) -> None:
    """Write a part; it is there under its name once it is whole."""
    place.mkdir(parents=True, exist_ok=True)
    unfinished = place / f"{part}.unfinished"
    dcp.write(unfinished, taken)
    _write_json(unfinished / _DIGESTS, dcp.digests(unfinished))
    dcp.sync_folder(unfinished)
    unfinished.rename(place / part)
    dcp.sync_folder(place)


def give_up(place: Path, part: str) -> None:
    """Tell whoever waits for this part that it will not come."""
    try:
        (place / f"{part}.failed").mkdir(parents=True, exist_ok=True)
    except OSError:
        pass  # then they find out when their patience ends


def wait_for_parts(place: Path, parts: list[str], timeout_s: float, stop: threading.Event) -> None:
    """Return when all parts are whole; DataError if one fails, never comes, or nobody wants them any more."""
    deadline = time.monotonic() + timeout_s
    while missing := [part for part in parts if not (place / part).exists()]:
        failed = [part for part in missing if (place / f"{part}.failed").exists()]
        if failed:
            raise DataError(f"{failed[0]} could not write its part")
        if stop.is_set():
            raise DataError(f"training ended before {missing[0]} had written its part")
        if time.monotonic() > deadline:
            raise DataError(f"{missing[0]} has not written its part after {timeout_s:g} s")
        time.sleep(_POLL_S)


def commit(place: Path, manifest: Manifest, keep: int) -> Path:
    """Make a saved folder count, and remove all but the last `keep`."""
    _write_json(place / MANIFEST, asdict(manifest))
    dcp.sync_folder(place)
    folder = place.parent
    target = folder / f"step-{manifest.step:08d}"
    if target.exists():  # of a run that has been gone back from
        _remove(target)
    place.rename(target)
    dcp.sync_folder(folder)
    for old in whole(folder)[:-keep]:
        _remove(old)
    return target


def _remove(path: Path) -> None:
    """Take the name away first: half a folder must never look whole."""
    removing = path.with_name(f"{path.name}.removing")
    path.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def part_digests(place: Path, parts: list[str]) -> dict[str, dict[str, str]]:
    """The digests that the writers of the parts have noted."""
    return {part: json.loads((place / part / _DIGESTS).read_text(encoding="utf-8")) for part in parts}


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself; DataError if it cannot be understood."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = content["format"]
        if version == FORMAT:
            return Manifest(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{MANIFEST} cannot be read ({error})") from error
    raise DataError(
        f"{path} has format {version}, and this version of thinwire reads format {FORMAT}",
        hint="go on with the version of thinwire that saved it",
    )


def verify(path: Path, manifest: Manifest, part: str) -> None:
    """Raise DataError unless every file of a part is as it was written."""
    noted = manifest.digests.get(part, {})
    if not noted:
        raise damaged(path, f"{MANIFEST} does not mention {part}")
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


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
