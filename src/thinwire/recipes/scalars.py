"""Events as TensorBoard scalars: one TensorBoard run per worker, so that their curves lie on each other."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.errors import MissingExtra
from thinwire.events import Evaluated, Event, Progress

FOLDER = "tensorboard"


def check_installed() -> None:
    """Raise MissingExtra if TensorBoard is not there."""
    _writer_class()


def _writer_class() -> Any:
    try:
        # TensorBoard's own writer: torch's would make the command line wait for torch
        from tensorboard.summary import Writer
    except ImportError as error:
        raise MissingExtra(
            f"TensorBoard scalars need a package that is not installed ({error})",
            hint="pip install 'thinwire[tensorboard]'",
        ) from None
    return Writer


class Scalars:
    """Writes what it is shown below the run folder; look at it with `tensorboard --logdir RUN`."""

    def __init__(self, run: Path) -> None:
        self._open = _writer_class()
        self._run = run
        self._writers: dict[int, Any] = {}

    def write(self, event: Event) -> None:
        """Take one event; those that hold no curve are passed over."""
        match event.record:
            case Progress() as progress:
                values = {
                    "train/loss": progress.loss,
                    "train/epoch": progress.epoch,
                    "train/samples_per_s": progress.samples_per_s,
                    "wire/sent_bytes": progress.sent_bytes,
                    "wire/exposed_s": progress.exposed_s,
                    "wire/exposed_share": progress.exposed_s / max(progress.train_s, 1e-9),
                    **{f"strategy/{name}": value for name, value in progress.instruments.items()},
                }
                self._add(event, progress.step, values)
            case Evaluated() as evaluated:
                values = {f"test/{evaluated.metric}": evaluated.value, "test/loss": evaluated.loss}
                self._add(event, evaluated.step, values)
            case _:
                pass

    def _add(self, event: Event, step: int, values: dict[str, float | None]) -> None:
        if event.rank not in self._writers:
            self._writers[event.rank] = self._open(str(self._run / FOLDER / f"worker-{event.rank}"))
        for tag, value in values.items():
            if value is not None:
                self._writers[event.rank].add_scalar(tag, value, step, wall_time=event.time)

    def close(self) -> None:
        """Write what is still in memory."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
