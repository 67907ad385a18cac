"""How the command line writes: data on stdout, results into a folder, everything else on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from thinwire.errors import MissingExtra, SettingError


def fail(message: str, hint: str = "", *, status: int = 1) -> int:
    """Write one error, and how to correct it, to stderr; return the exit status."""
    sys.stderr.write(f"error: {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return status


def note(text: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int], indent: int = 0) -> str:
    """Columns of numbers, aligned to the right; only the columns `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in cells)

    return "\n".join(" " * indent + line(row).rstrip() for row in rows)


def results_folder(
    out: Path | None, name: str, *, may_hold: Callable[[Path], bool] = lambda folder: False, hint: str = ""
) -> Path:
    """Make `out`, empty unless `may_hold` allows what is in it; None is a folder named by `name` and time."""
    if out is None:
        name = f"{name.replace(':', '-').replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = unused(Path("runs") / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not may_hold(out):
            raise SettingError(f"--out must be a new or empty folder, and {out} is not empty", hint=hint)
    except OSError as error:
        rule = "--out must be a folder that can be written to"
        raise SettingError(f"{rule}, {out} is not: {error.strerror}") from None
    return out


def unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], others) if not each.exists())


@contextmanager
def optional_page() -> Iterator[None]:
    """Let a command end well if it can do everything but draw a page, because matplotlib is not installed."""
    try:
        yield
    except MissingExtra as missing:
        note(f"no page was made: {missing.message} ({missing.hint})")
