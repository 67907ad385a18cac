"""Utilisation of the GPU while something runs."""

from __future__ import annotations

import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMAND = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")


@dataclass(slots=True)
class Utilisation:
    """Samples of nvidia-smi, twice a second; none where there is no GPU."""

    busy: list[float] = field(default_factory=list)
    """Percent of the time in which some kernel ran."""
    memory_mb: list[float] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ask in here."""
        try:
            asking = subprocess.Popen([*COMMAND, "-lms", "500"], stdout=subprocess.PIPE, text=True)
        except OSError:
            yield
            return
        reader = threading.Thread(target=self._read, args=(asking,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            asking.terminate()
            asking.wait()
            reader.join()

    def _read(self, asking: subprocess.Popen[str]) -> None:
        assert asking.stdout is not None
        for line in asking.stdout:
            busy, _, memory = line.partition(",")
            try:
                self.busy.append(float(busy))
                self.memory_mb.append(float(memory))
            except ValueError:
                continue  # "[N/A]" from a GPU that does not tell

    def summary(self) -> dict[str, float | None]:
        """Mean share of time in which a kernel ran, and the most memory used."""
        return {
            "gpu_busy_percent": statistics.mean(self.busy) if self.busy else None,
            "gpu_memory_mb": max(self.memory_mb, default=None),
        }
