"""Checkpoint: save a training beside it, and go on from where it stood."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine import folders, tensors
from thinwire.engine.buckets import local
from thinwire.engine.folders import Manifest
from thinwire.engine.link import Link
from thinwire.engine.parts import OwnBuffers, OwnPart, Part, Random, Replica, mean
from thinwire.engine.saver import Saver
from thinwire.engine.split_state import SplitReplica, join_model
from thinwire.errors import DataError, ThinwireError, UsageError, check
from thinwire.files import lock, unlock

SEE_S = 10.0
"""Seconds a worker looks for what another one has written: a network file system may be slow to show it."""


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
        """Hold `folder` until `close`, and remove what a killed run has left half saved there.

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
        # without the wrapper of torch.compile, whose name would be in all keys
        model = getattr(model, "_orig_mod", model)
        self.folder = Path(folder)
        self.parts: dict[str, Part] = {"link": link, "random": Random(model, link.rank)}
        if (split := link.split_replica(optimizer)) is not None:
            self.parts |= {"split": split, "buffers": OwnBuffers(model, link.rank)}
        elif link.has_groups:
            _refuse_split_replicas(model, link)
            self.parts["split"] = Replica(model, optimizer)
        elif link.strategy.replicas_agree:
            self.parts |= {"model": model, "optimizer": optimizer, "buffers": OwnBuffers(model, link.rank)}
        else:
            self.parts["replica"] = Replica(model, optimizer)
        if link.companion is not None:
            self.parts["companion"] = link.companion
        taken = self.parts.keys() & parts.keys()
        check(not taken, "parts", "named other than those of thinwire's own", sorted(taken))
        self.parts |= parts
        self._link, self._described = link, (model, optimizer, split)
        self._settings = {key: str(value) for key, value in (settings or {}).items()}
        self._loaded = False
        self._lock: int | None = None
        """Held by rank 0."""
        self._saver = Saver(self.folder, link, nonce=self._open(), keep=keep)

    def _about(self) -> dict[str, str]:
        """What must be the same for a run to go on; shapes are those of now, as a model may shrink."""
        return {
            "strategy": repr(self._link.strategy),
            **self._settings,
            **_describe(*self._described),
            "parts": ", ".join(sorted(self.parts)),
        }

    def _open(self) -> str:
        """Agree that all see the same folder, on what is in it, and on a name for this run, returned."""
        nonce, latest = os.urandom(4).hex(), ""
        with self._together():
            if self._link.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = lock(self.folder)
                folders.sweep(self.folder)
                latest = next((path.name for path in reversed(folders.whole(self.folder))), "")
                (self.folder / f"step-0.probe-{nonce}").mkdir()
        agreed: list[str] = self._link.all_gather_object([nonce, latest])[0]
        nonce, latest = agreed
        self._latest = self.folder / latest if latest else None
        probe = self.folder / f"step-0.probe-{nonce}"
        with self._together():
            deadline = time.monotonic() + SEE_S
            while not probe.exists():
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{self.folder} is not the folder that worker 0 has under that name",
                        hint="checkpoints need a folder that all workers share",
                    )
                time.sleep(0.05)
        if self._link.rank == 0:
            probe.rmdir()
        return nonce

    # -- loading ----------------------------------------------------------------------------------

    def load(self) -> Manifest | None:
        """Take everything from the newest checkpoint, and give what it says of itself, such as its `step`;
        None if there is none yet. Called by all workers.

        DataError, on all workers and before anything is changed, if it is damaged or of another training.
        With another number of workers, parts that each worker has of its own are resized.
        """
        path, manifest = self._latest, None
        if path is not None:
            with self._together():
                manifest = folders.read_manifest(path)
                folders.compare(path, manifest.about, self._about())
                states = self._read(path, manifest)
            resizes = manifest.world_size != self._link.world_size
            with self._together():
                for name, part in self.parts.items():
                    try:
                        if isinstance(part, OwnPart) and (resizes or isinstance(part, SplitReplica)):
                            part.resize(states[name])
                        else:
                            part.load_state_dict(states[name][0])
                    except ThinwireError:
                        raise
                    except Exception as error:  # whatever a part makes of numbers that are not its own
                        raise DataError(f"{name} of {path} does not fit: {error}") from error
        self._loaded = True  # only now: a checkpoint that cannot be read is not to be replaced
        return manifest

    def _read(self, path: Path, manifest: Manifest) -> dict[str, list[Any]]:
        """The states of every part: one if it is to be loaded, several if they are to be resized."""
        same = manifest.world_size == self._link.world_size
        ranks = [self._link.rank] if same else range(manifest.world_size)
        parts = {name for name, part in self.parts.items() if isinstance(part, OwnPart)}
        common = folders.read_part(path, manifest, folders.COMMON, self.parts.keys() - parts)
        whole = {name for name, part in self.parts.items() if isinstance(part, SplitReplica)}
        own = [folders.read_part(path, manifest, folders.worker(rank), parts - whole) for rank in ranks]
        found = {name: [each[name] for each in own] for name in parts - whole}
        found |= {name: _read_all(path, manifest, name) for name in whole}
        return found | {name: [common[name]] for name in self.parts.keys() - parts}

    @staticmethod
    def read_model(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
        """The state dict of the model in the newest checkpoint of `folder`, for use without a link.

        Of replicas that differ it is the mean. DataError if there is none, or it is damaged.
        """
        path = next(reversed(folders.whole(Path(folder))), None)
        if path is None:
            raise DataError(f"there is no checkpoint in {folder}", hint="name the folder that holds step-...")
        manifest = folders.read_manifest(path)
        parts = manifest.about.get("parts", "").split(", ")
        if "split" in parts:
            saved = _read_all(path, manifest, "split")
            if "groups" not in saved[0]:  # parts of whole models, by replica_ranks
                raise DataError(
                    f"no worker holds the whole model of {path}", hint="load it with replica_ranks"
                )
            return join_model(saved)
        if "replica" in parts:
            saved = _read_all(path, manifest, "replica")
        else:
            saved = [folders.read_part(path, manifest, folders.COMMON, {"model"})]
        model: dict[str, Tensor] = mean([each["model"] for each in saved])
        return model

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the state after `step`. Called by all workers, between steps; writing goes on beside training.

        Training waits here for a copy in memory, and for the save before this one if that is not done yet.
        """
        check(step >= 0, "step", "0 or more", step)
        if self._latest is not None and not self._loaded:
            raise UsageError(
                f"{self.folder} already holds {self._latest.name}, which saving would remove in the end",
                hint="call load() first to go on from it, or name another folder",
            )
        self.wait()
        self._link.synchronize()
        everyones = {name: part for name, part in self.parts.items() if not isinstance(part, OwnPart)}
        own = tensors.snapshot({n: part.state_dict() for n, part in self.parts.items() if n not in everyones})
        common = None
        if self._link.rank == 0:
            common = tensors.snapshot({name: part.state_dict() for name, part in everyones.items()})
        self._saver.start(step, own, common, self._about())

    def wait(self) -> None:
        """Return when this worker has nothing left to write; a save that failed is warned about here."""
        self._saver.wait()

    def close(self) -> None:
        """Wait until everything is saved, and let other processes have the folder."""
        try:
            self.wait()
        finally:
            unlock(self._lock, self.folder)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._saver.stop()
        self.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """All workers get here; an error of one of them in here is raised by all."""
        failure = {}
        try:
            yield
        except OSError as error:
            failure = {
                "error": f"{self.folder}: {error}",
                "hint": "checkpoints need a folder all can write to",
            }
        except ThinwireError as error:
            failure = {"error": error.message, "hint": error.hint}
        for rank, each in enumerate(self._link.all_gather_object(failure)):
            if each:
                raise DataError(f"worker {rank}: {each['error']}", hint=each["hint"])


def _read_all(path: Path, manifest: Manifest, name: str) -> list[Any]:
    """What all workers saved of a part, in order of rank."""
    files = map(folders.worker, range(manifest.world_size))
    return [folders.read_part(path, manifest, file, {name})[name] for file in files]


def _describe(model: nn.Module, optimizer: Optimizer, split: SplitReplica | None) -> dict[str, str]:
    """Shapes and kinds, as text by name."""
    tensors = {
        **{f"parameter {name}": p for name, p in model.named_parameters()},
        **{f"buffer {name}": b for name, b in model.named_buffers()},
    }
    about = {name: f"{tuple(t.shape)} {t.dtype}".replace("torch.", "") for name, t in tensors.items()}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if split is not None and split.owned is not None:
        sizes = split.owned.group_sizes(optimizer)
    return {"optimizer": f"{type(optimizer).__name__} over {sizes} parameters", **about}


def _refuse_split_replicas(model: nn.Module, link: Link) -> None:
    """Replicas that differ are saved by each worker, which has only a part of a split layer."""
    if name := next((name for name, p in model.named_parameters() if local(p) is not p), ""):
        raise UsageError(
            f"a checkpoint cannot hold {name}, which is split, under {link.strategy!r}, "
            "whose replicas differ",
            hint="keep tw.parallel.full_state_dict(model), or use a strategy such as AllReduce",
        )
