"""Files that others may have damaged or may be using: reads that end, and folders that one process holds."""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.errors import DataError, UsageError

_MOST_OWNER_BYTES = 300


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read; OSError for anything but a regular one (a FIFO would never end)."""
    # without O_NONBLOCK, opening a FIFO waits until somebody writes
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file; OSError if it is larger than `most_bytes`."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"it has {num_bytes:,} bytes", str(path))
        return file.read(num_bytes)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before the work is done whose result it is for."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError(f"{path} cannot be written: {folder} is no folder that can be written to")
    if path.is_dir():
        raise DataError(
            f"{path} cannot be written: it is a folder", hint=f"name a file in it: {path / 'NAME'}"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut, as fsync does for the contents of files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(folder: Path, name: str = ".lock") -> int | None:
    """Hold a folder against other processes, until `unlock` or the end of this one, however it ends.

    UsageError names the process that holds it already. None, and a warning, where the disk knows no locks.
    """
    import fcntl  # here, because Windows has none

    path = folder / name
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{folder} cannot be written to: {error.strerror}") from error
        try:
            # lockf, not flock: a forked child, say of a DataLoader, must not keep it alive
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, _MOST_OWNER_BYTES).decode("utf-8", errors="replace").strip()
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UsageError(
                    f"{folder} is in use by {owner or 'another process'}",
                    hint="wait until that run has ended, or name another folder",
                ) from None
            warnings.warn(f"{folder} cannot be locked ({error.strerror}); use it for one run", stacklevel=2)
            return None
        if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
            break
        os.close(handle)  # its last owner removed it in between
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def unlock(handle: int | None, folder: Path, name: str = ".lock") -> None:
    """Let others have the folder."""
    if handle is not None:
        (folder / name).unlink(missing_ok=True)  # while it is held: nobody else can have taken it
        os.close(handle)


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold a folder inside the block."""
    handle = lock(folder, name)
    try:
        yield
    finally:
        unlock(handle, folder, name)
