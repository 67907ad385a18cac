"""Another process that holds a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import os, sys
from pathlib import Path
from thinwire.files import lock
lock(Path(sys.argv[1]), sys.argv[2])
if os.fork():
    print("held", flush=True)
    sys.stdin.read()
else:
    sys.stdin.close()
    while os.read(int(sys.argv[3]), 1):  # a child that outlives its parent
        pass
    os._exit(0)
"""


@contextmanager
def holder(folder: Path, name: str = ".lock") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder, and has a forked child, which lives until the end of the block."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", HOLD, str(folder), name, str(reading)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[reading]) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
            os.close(writing)
            os.close(reading)
