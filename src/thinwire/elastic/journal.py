"""What a worker of an elastic world writes down for whoever tries it under faults: one JSON object per line.

Written only where THINWIRE_JOURNAL names a folder, as `thinwire chaos` does. Each line is written at once, so
a killed worker leaves all but the line it was writing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "THINWIRE_JOURNAL"


class Journal:
    """One worker's file; without a folder nothing is written."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE, "")
        self._file = -1
        self._lock = threading.Lock()
        self._missed: dict[str, set[str]] = {}
        if folder:
            path = Path(folder) / f"{socket.gethostname()[:32]}-{os.getpid()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def note(self, what: str, **facts: Any) -> None:
        with self._lock:
            if self._file >= 0:
                line = json.dumps({"at": time.time(), "what": what, **facts}) + "\n"
                os.write(self._file, line.encode())

    def note_missed(self, now: Mapping[str, Collection[str]], members: Collection[str]) -> None:
        """Write down which members this worker has begun to miss since the last call; `now`: all, by how."""
        for how, missed in now.items():
            ids = set(missed) & set(members)
            for id_ in ids - self._missed.get(how, set()):
                self.note("missed", id=id_, how=how)
            self._missed[how] = ids

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
