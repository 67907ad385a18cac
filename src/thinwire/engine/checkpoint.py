"""Checkpoint: save a training beside it, and go on from where it stood."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from thinwire.engine import compatibility, dcp, folders
from thinwire.engine.folders import Manifest
from thinwire.engine.link import Link
from thinwire.engine.parts import OwnBuffers, OwnPart, Part, Random, Replica
from thinwire.engine.saver import Crew, Saver
from thinwire.errors import DataError, ThinwireError, UsageError, check

SEE_S = 10.0
"""Seconds a worker looks for what another one has written: a network file system may be slow to show it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint a training goes on from."""

    path: Path
    step: int
    world_size: int
    """Workers that saved it."""


class Checkpoint:
    """The checkpoints of one training, in a folder that all workers see; made and used by all of them.

    Model, optimizer, link and random numbers are always part of it. Anything else with `state_dict` and
    `load_state_dict` is added by name: rank 0's is saved, and everybody loads it. A part that also has
    `resize` is saved by every worker (see `parts`).

    >>> import tempfile, torch, thinwire as tw
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tw.attach(model, optimizer, tw.AllReduce()) as link:
    ...     with tw.Checkpoint(folder.name, link=link, model=model, optimizer=optimizer) as checkpoint:
    ...         saved = checkpoint.load()
    ...         for step in range(1 + (saved.step if saved else 0), 4):
    ...             model(torch.ones(4, 2)).sum().backward()
    ...             optimizer.step()
    ...             checkpoint.save(step)
    >>> sorted(path.name for path in checkpoint.folder.iterdir())
    ['step-00000002', 'step-00000003']
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        link: Link,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Mapping[str, object] | None = None,
        keep: int = 2,
        **parts: Part,
    ) -> None:
        """Look into `folder`, and remove what a killed run has left half saved there.

        Args:
            folder: on a disk that all workers share.
            link: what `attach` returned.
            model: as attached.
            optimizer: as attached.
            settings: what must be the same for a run to go on from a checkpoint.
            keep: checkpoints that are kept; older ones are removed.
            parts: whatever else must survive, such as `schedule=` and `shards=`.
        """
        check(keep >= 1, "keep", "at least 1", keep)
        self.folder = Path(folder)
        self.parts: dict[str, Part] = {"link": link, "random": Random(compatibility.plain(model), link.rank)}
        if link.strategy.replicas_agree:
            self.parts |= {"model": compatibility.plain(model), "optimizer": optimizer}
            self.parts["buffers"] = OwnBuffers(compatibility.plain(model), link.rank)
        else:
            self.parts["replica"] = Replica(compatibility.plain(model), optimizer)
        taken = self.parts.keys() & parts.keys()
        check(not taken, "parts", "named other than those of thinwire's own", sorted(taken))
        self.parts |= parts
        self._link = link
        self._about = {
            "strategy": repr(link.strategy),
            **{key: str(value) for key, value in (settings or {}).items()},
            **compatibility.describe(compatibility.plain(model), optimizer),
            "parts": ", ".join(sorted(self.parts)),
        }
        self._loaded = False
        nonce = self._open()
        self._saver = Saver(
            self.folder, Crew(link.rank, link.world_size, link.timeout_s), self._about, nonce=nonce, keep=keep
        )

    def _open(self) -> str:
        """Agree on what is there, that all see the same folder, and on a name for this run, returned."""
        nonce = self._together(self._prepare)[0]
        probe = self.folder / f"step-0.probe-{nonce}"

        def sees() -> str:
            deadline = time.monotonic() + SEE_S
            while not probe.exists():
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{self.folder} is not the folder that worker 0 has under that name",
                        hint="checkpoints need a folder that all workers share",
                    )
                time.sleep(0.05)
            return ""

        self._together(sees)
        if self._link.rank == 0:
            probe.rmdir()
        existing = self._together(lambda: next((p.name for p in reversed(folders.whole(self.folder))), ""))
        self._latest = self.folder / existing[0] if existing[0] else None
        return nonce

    def _prepare(self) -> str:
        if self._link.rank != 0:
            return ""
        nonce = os.urandom(4).hex()
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(self.folder)
        (self.folder / f"step-0.probe-{nonce}").mkdir()
        return nonce

    # -- loading ----------------------------------------------------------------------------------

    def load(self) -> Saved | None:
        """Take everything from the newest checkpoint; None if there is none yet. Called by all workers.

        DataError, on all workers and before anything is changed, if it is damaged or of another training.
        With another number of workers, parts that each worker has of its own are resized.
        """
        self._loaded = True
        if self._latest is None:
            return None
        path, states = self._latest, dict[str, list[dict[str, Any]]]()
        manifest: Manifest

        def look() -> str:
            nonlocal manifest
            manifest = folders.read_manifest(path)
            compatibility.compare(path, manifest.about, self._about)
            states.update(self._read(path, manifest))
            return ""

        def take() -> str:
            for name, part in self.parts.items():
                try:
                    if isinstance(part, OwnPart) and manifest.world_size != self._link.world_size:
                        part.resize(states[name])
                    else:
                        part.load_state_dict(states[name][0])
                except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
                    raise DataError(f"{name} of {path} does not fit: {error}") from error
            return ""

        self._together(look)
        self._together(take)
        return Saved(path, manifest.step, manifest.world_size)

    def _read(self, path: Path, manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
        """The states of every part: one if it is to be loaded, several if they are to be resized."""
        ranks = [self._link.rank]
        if manifest.world_size != self._link.world_size:
            ranks = list(range(manifest.world_size))
        names = [folders.COMMON, *map(folders.worker, ranks)]
        for name in names:
            folders.verify(path, manifest, name)
        try:
            common, *own = [dcp.read(path / name) for name in names]
        except Exception as error:  # whatever unpickling may raise
            raise folders.damaged(path, f"it cannot be read ({type(error).__name__}: {error})") from error
        return {
            name: [each[name] for each in own] if isinstance(part, OwnPart) else [common[name]]
            for name, part in self.parts.items()
        }

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step`. Called by all workers, between steps; writing goes on beside training.

        Training waits here for a copy in memory, and for the save before this one if that is not done yet.
        """
        if self._latest is not None and not self._loaded:
            raise UsageError(
                f"{self.folder} already holds {self._latest.name}, which saving would remove in the end",
                hint="call load() first to go on from it, or name another folder",
            )
        self.wait()
        self._link.synchronize()
        everyones = {name: part for name, part in self.parts.items() if not isinstance(part, OwnPart)}
        own = dcp.snapshot({n: part.state_dict() for n, part in self.parts.items() if n not in everyones})
        common = None
        if self._link.rank == 0:
            common = dcp.snapshot({name: part.state_dict() for name, part in everyones.items()})
        self._saver.start(step, own, common)

    def wait(self) -> None:
        """Return when this worker has nothing left to write; a save that failed is warned about here."""
        self._saver.wait()

    def close(self) -> None:
        """Wait until everything is saved."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._saver.stop()
        self.close()

    def _together(self, answer: Callable[[], str]) -> list[str]:
        """Everybody's answer, in order of rank; an error of one worker is raised by all."""
        try:
            mine = {"answer": answer()}
        except OSError as error:
            mine = {"error": f"{self.folder}: {error}", "hint": "checkpoints need a folder all can write to"}
        except ThinwireError as error:
            mine = {"error": error.message, "hint": error.hint}
        everyones = self._link.all_gather_object(mine)
        for rank, each in enumerate(everyones):
            if "error" in each:
                raise DataError(f"worker {rank}: {each['error']}", hint=each["hint"])
        return [each["answer"] for each in everyones]
