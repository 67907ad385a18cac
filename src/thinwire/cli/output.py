"""How the command line writes: data on stdout, the rest on stderr."""

from __future__ import annotations

import sys


def fail(message: str, hint: str = "", *, status: int = 1) -> int:
    """Write one error, with what to do about it, to stderr; return the exit status."""
    sys.stderr.write(f"error: {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return status


def note(text: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(rows: list[tuple[str, str]], *, indent: int = 0) -> str:
    """Two columns, the first as wide as it needs to be."""
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{'':{indent}}{left:{width}}  {right}" for left, right in rows)
