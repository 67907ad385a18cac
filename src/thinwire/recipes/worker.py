"""One worker process of a recipe: `python -m thinwire.recipes.worker RUN`, started by torch's launcher.

RUN is a run folder with its config.json. Everything the worker has to say goes into its event file there.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from thinwire.errors import DataError, PeerLate, PeerLost, ThinwireError
from thinwire.events import Event, EventWriter, Failed, Record, RunStarted
from thinwire.recipes import registry
from thinwire.recipes.config import CHECKPOINTS, RunConfig, read_config, versions

LIFELINE = "THINWIRE_LIFELINE"
"""Set in the environment of a worker whose standard input ends when the process that wants it does."""


def work(
    run: Path,
    config: RunConfig,
    environment: Mapping[str, str],
    watch: Callable[[Event], object] | None = None,
) -> None:
    """Be one of the workers of a run; `watch` sees each event as it is written."""
    rank, world_size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    with EventWriter(run, rank) as writer:

        def emit(record: Record) -> None:
            event = writer.write(record)
            if watch is not None:
                watch(event)

        failures = ReportFailure(emit)
        with failures:
            emit(
                RunStarted(
                    config=asdict(config),
                    versions=versions(),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    world_size=world_size,
                )
            )
            # torch takes seconds to import: only now, when the others can see that this worker is up
            from thinwire.recipes.train import Worker, train

            local_rank = int(environment.get("LOCAL_RANK", "0"))
            worker = Worker(rank, world_size, local_rank, run / CHECKPOINTS)
            trace = run / f"trace-worker-{rank}.json" if config.profile else None
            train(registry.get(config.recipe), config, worker, emit, failures, trace)
            _leave()


class ReportFailure:
    """Writes the first error that passes through it into the events; can be entered again inside itself.

    The loop enters it inside `attach`, so that the cause is on record before peers hear of it and fail too.
    """

    def __init__(self, emit: Callable[[Record], object]) -> None:
        self._emit = emit
        self._reported = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._reported or not isinstance(error, Exception):
            return
        self._reported = True
        ours = isinstance(error, ThinwireError)
        self._emit(
            Failed(
                host=socket.gethostname(),
                error=type(error).__name__,
                message=error.message if isinstance(error, ThinwireError) else str(error),
                hint=error.hint if isinstance(error, ThinwireError) else "",
                expected=ours,
                consequence=isinstance(error, PeerLost | PeerLate),
            )
        )


def _leave() -> None:
    """Say good-bye to the process group that attach has started."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def hold_on_to(lifeline: int) -> None:
    """End this process, whatever it is doing, once the other end of `lifeline` is closed.

    A killed parent cannot tell its workers to stop, but the system closes its files: so nobody is orphaned.
    """

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(130)

    threading.Thread(target=watch, name="thinwire-lifeline", daemon=True).start()


def main() -> None:
    """Work on the run named on the command line, and end this process; its status is 1 after an error."""
    if os.environ.get(LIFELINE):
        hold_on_to(sys.stdin.fileno())
    status = 0
    try:
        if len(sys.argv) != 2:
            raise DataError("one argument is expected: the run folder")
        run = Path(sys.argv[1])
        work(run, read_config(run), os.environ)
    except Exception:  # noqa: BLE001  # all of it goes to the log; the reason is in the events
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error threads may sit in a backend that waits for a peer that is gone, and
    # after a success taking torch apart costs a second for each worker.
    os._exit(status)


if __name__ == "__main__":
    main()
