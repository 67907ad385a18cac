"""The folders of a run's checkpoints: which one counts, how one becomes whole, what is swept away.

    step-00000120/            whole, because it has this name
        manifest.json         what it is of, and the size and digest of every file
        common.safetensors    what all workers share, written by rank 0
        worker-0.safetensors  what each has of its own
    step-00000150.saving-3f9a1c22/

A folder gets its name by one rename, after everything in it has reached the disk. So a kill at any moment
leaves the last whole one, and a folder whose name says that it was being saved, which the next start removes.
Reading one runs no code, whatever is in it: JSON and the bytes of tensors (see `tensors`).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.checked_json import fits
from thinwire.engine import tensors
from thinwire.errors import DataError
from thinwire.files import read_regular

COMMON = "common.safetensors"
MANIFEST = "manifest.json"
FORMAT = 2
_WHOLE = re.compile("step-([0-9]{8,18})")
_UNFINISHED = re.compile("step-[0-9]{8,18}[.](saving-[0-9a-f]{8}|removing)|step-0[.]probe-[0-9a-f]{8}")
_FILE = {"bytes": int, "sha256": str}
_MOST_MANIFEST_BYTES = 1 << 28
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
    files: Mapping[str, Mapping[str, Any]]
    """By file: its size, `bytes`, and its digest, `sha256`."""


def worker(rank: int) -> str:
    """The file of one worker."""
    return f"worker-{rank}.safetensors"


def whole(folder: Path) -> list[Path]:
    """The checkpoints that are whole, oldest first."""
    found = [path for path in folder.glob("step-*") if _WHOLE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def sweep(folder: Path) -> None:
    """Remove what a killed run has left half saved or half removed, and nothing else."""
    for path in folder.glob("step-*.*"):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# -- reading --------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself; DataError if it cannot be understood."""
    try:
        return _read_manifest(path)
    except (OSError, ValueError) as error:
        raise damaged(path, f"{MANIFEST} {_reason(error)}") from error


def _read_manifest(path: Path) -> Manifest:
    """Every field is checked before it is used: a size in it must not decide how much memory is taken."""
    text = read_regular(path / MANIFEST, _MOST_MANIFEST_BYTES)
    try:
        content = json.loads(text)
        version = content["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be understood ({error})") from error
    if isinstance(version, int) and version != FORMAT:
        raise DataError(
            f"{path / MANIFEST} has format {version}, and this version of thinwire reads format {FORMAT}",
            hint="go on with the version of thinwire that saved it",
        )
    if content.pop("sha256", None) is None or _as_text(content) != text:
        raise ValueError("is not as it was written")
    step, world_size = content.get("step"), content.get("world_size")
    about, files = content.get("about"), content.get("files")
    _require(fits(step, int) and path.name == f"step-{step:08d}", "step", "that of its folder", step)
    _require(fits(about, Mapping[str, str]), "about", "text by name", about)
    _require(fits(files, Mapping[str, object]), "files", "facts by name", files)
    fit = fits(world_size, int) and 1 <= world_size == len(files) - 1
    _require(fit, "world_size", f"1 or more, and one less than its {len(files)} files", world_size)
    for name in (COMMON, *map(worker, range(world_size))):
        facts = files.get(name)
        known = fits(facts, _FILE) and facts.keys() == _FILE.keys()
        _require(known, f"files[{name!r}]", "its size in bytes and its sha256", facts)
    return Manifest(format=FORMAT, step=step, world_size=world_size, about=about, files=files)


def _require(condition: bool, field: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"has a wrong field: {field} must be {rule}, got {repr(value)[:80]}")


def as_text(manifest: Manifest) -> bytes:
    """A manifest as it is written."""
    return _as_text(asdict(manifest))


def _as_text(content: Mapping[str, Any]) -> bytes:
    """Its last line is the digest of all the others."""
    text = json.dumps(content, indent=1)
    return f'{text[:-2]},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def read_part(path: Path, manifest: Manifest, name: str, parts: Collection[str]) -> dict[str, Any]:
    """The states of `parts` in one file of a checkpoint; DataError unless it is as it was written."""
    try:
        states = tensors.read(path / name, manifest.files[name])
    except (OSError, ValueError, MemoryError) as error:
        raise damaged(path, f"{name} {_reason(error)}") from error
    missing = sorted(set(parts) - set(states)) if isinstance(states, dict) else ["any part"]
    if missing:
        raise damaged(path, f"{name} does not hold {', '.join(missing)}")
    return dict(states)


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


def damaged(path: Path, what: str) -> DataError:
    """The error for a checkpoint that cannot be used, with what to do about it."""
    good = [other.name for other in whole(path.parent) if other != path and _has_all_files(other)]
    instead = f"to go on from {good[-1]}" if good else "to start again"
    return DataError(
        f"{path} is damaged: {what}",
        hint=f"rename that folder, for example to {path.name}.damaged, {instead}",
    )


def _has_all_files(path: Path) -> bool:
    try:
        files = _read_manifest(path).files
        return all((path / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (OSError, ValueError, DataError):
        return False
