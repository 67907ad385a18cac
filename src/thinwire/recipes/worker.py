"""One worker process of a recipe: `python -m thinwire.recipes.worker RUN CONFIG`, by torch's launcher.

RUN is a run folder, CONFIG the name of its configuration there. The worker reports through its event file.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from thinwire.errors import PeerLate, PeerLost, ThinwireError
from thinwire.event_log import EventWriter
from thinwire.events import Event, Failed, Record
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, read_config, run_started

Watch = Callable[[Event], object]
LIFELINE = "THINWIRE_LIFELINE"
"""Environment variable of a worker whose standard input ends when its parent process does."""


def work(
    run: Path, config: RunConfig, environment: Mapping[str, str], watch: Watch = lambda event: None
) -> None:
    """Train as one of the workers of a run; `watch` sees each event as it is written."""
    rank, world_size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    with EventWriter(run, rank) as writer:

        def emit(record: Record) -> None:
            watch(writer.write(record))

        with ReportFailure(emit) as failures:
            emit(run_started(config, world_size))
            # torch takes seconds to import: only now, when the others can see that this worker is up
            import torch.distributed as dist

            from thinwire.recipes.elastic import train_elastic
            from thinwire.recipes.train import WorkerContext, train

            local_rank = int(environment.get("LOCAL_RANK", "0"))
            if config.elastic:
                recipe = registry.get(config.recipe)
                train_elastic(recipe, config, rank, emit, failures, local_rank=local_rank)
                return
            worker = WorkerContext(rank, world_size, local_rank, run / "checkpoints")
            trace = run / f"trace-worker-{rank}.json" if config.profile else None
            train(registry.get(config.recipe), config, worker, emit, failures, trace)
            if dist.is_initialized():  # by attach
                dist.destroy_process_group()


class ReportFailure(AbstractContextManager["ReportFailure"]):
    """Writes the first error that passes through it into the events; can be entered again inside itself.

    The loop enters it inside `attach`, so that the cause is on record before peers notice and fail too.
    """

    def __init__(self, emit: Callable[[Record], object]) -> None:
        self._emit = emit
        self._reported = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._reported or not isinstance(error, Exception):
            return
        self._reported = True
        told = error if isinstance(error, ThinwireError) else ThinwireError(str(error))
        self._emit(
            Failed(
                host=socket.gethostname(),
                error=type(error).__name__,
                message=told.message,
                hint=told.hint,
                expected=told is error,
                consequence=isinstance(error, PeerLost | PeerLate),
            )
        )


def hold_on_to(lifeline: int) -> None:
    """End this process, whatever it is doing, once the other end of `lifeline` is closed.

    A killed parent cannot tell its workers to stop, but the system closes its files: no worker is orphaned.
    """

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(130)  # sys.exit would only end this thread

    threading.Thread(target=watch, name="thinwire-lifeline", daemon=True).start()


def run_and_exit(work: Callable[[list[str]], object]) -> NoReturn:
    """Call `work` with the command line's arguments, then end this process; with status 1 after an error."""
    if os.environ.get(LIFELINE):
        hold_on_to(sys.stdin.fileno())
    status = 0
    try:
        work(sys.argv[1:])
    except Exception:  # noqa: BLE001  # all of it goes to the log; the reason is in the events
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error threads may sit in a backend that waits for a peer that is gone, process
    # groups that were left behind can hang, and taking torch apart costs a second for each worker.
    os._exit(status)


if __name__ == "__main__":
    run_and_exit(lambda words: work(Path(words[0]), read_config(Path(words[0]), words[1]), os.environ))
