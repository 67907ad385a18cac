"""A worker's telephone to the lab: change rates, cause faults, read counters, while running; no torch.

Each worker inherits one end of a socket pair; one JSON line asks, one answers.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.network import Counters

CONTROL_VARIABLE = "THINWIRE_LAB_CONTROL"
"""Environment variable with the number of the open socket; set by the lab for every worker."""


class Control:
    """Asks the lab this worker runs in; use from one thread at a time."""

    def __init__(self, connection: socket.socket, *, timeout_s: float = 30.0) -> None:
        self._connection = connection
        self._connection.settimeout(timeout_s)
        self._reader = connection.makefile("r", encoding="utf-8")

    @staticmethod
    def of_this_worker() -> Control | None:
        """The line of this process; None outside a lab."""
        number = os.environ.get(CONTROL_VARIABLE, "")
        return Control(socket.socket(fileno=os.dup(int(number)))) if number else None

    def set_rate(self, bit_per_s: float, *, host: int | None = None) -> None:
        """Shape the path of one host, or of all."""
        self._ask(do="rate", rate=f"{bit_per_s:.0f}bit", host=host)

    def set_uplink(self, bit_per_s: float) -> None:
        """Shape the uplinks of all sites."""
        self._ask(do="uplink", rate=f"{bit_per_s:.0f}bit")

    def fault(self, text: str) -> None:
        """Cause a fault now: `cut:host=3`, without a step or a time."""
        self._ask(do="fault", fault=text)

    def report(self, value: Any) -> None:
        """Hand a result (anything JSON can hold) to whoever started the run: `Outcome.reports`."""
        self._ask(do="report", value=value)

    def counters(self) -> list[Counters]:
        """Bytes and packets of every host so far."""
        return [Counters(*numbers) for numbers in self._ask(do="counters")]

    def restart_load(self) -> None:
        """Forget the processor load seen so far."""
        self._ask(do="restart_load")

    def load(self) -> tuple[float, str | None]:
        """Busy share of the processors since the last restart, and the warning it deserves."""
        share, warning = self._ask(do="load")
        return float(share), warning

    def close(self) -> None:
        self._reader.close()
        self._connection.close()

    def _ask(self, **request: Any) -> Any:
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        line = self._reader.readline()
        if not line:
            raise UsageError("the lab is gone")
        reply = json.loads(line)
        if "error" in reply:
            raise UsageError(f"the lab refused {request['do']}: {reply['error']}")
        return reply["answer"]
