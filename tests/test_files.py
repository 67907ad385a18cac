"""Reads that always end, and folders that one process holds: with real processes, FIFOs and kills."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.holding import holder
from thinwire.errors import UsageError
from thinwire.files import lock, locked, open_regular, read_regular, unlock


def test_a_held_folder_is_refused_with_the_name_of_its_owner_who_may_be_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(UsageError) as caught:
            lock(tmp_path)
        assert caught.value.message == (
            f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}"
        )
        process.kill()
        process.wait()
        with locked(tmp_path):  # though its child still lives
            assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    assert not any(tmp_path.iterdir())


def test_a_lock_can_be_taken_again_by_its_own_process(tmp_path: Path) -> None:
    """As a cell of a notebook that is run twice does."""
    first, second = lock(tmp_path), lock(tmp_path)
    unlock(second, tmp_path)
    unlock(first, tmp_path)
    assert not any(tmp_path.iterdir())


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(path)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes"):
        read_regular(tmp_path / "file", 4)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it has 1,099,511,627,776 bytes"):
        read_regular(tmp_path / "sparse", 1 << 20)
