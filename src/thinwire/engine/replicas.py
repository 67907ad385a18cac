"""The workers' copies of a model: checked, started alike, averaged, compared."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine import tensors
from thinwire.engine.buckets import ParameterBucket, local
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import PeerDiffers
from thinwire.wire.work import Work

_CHUNK_BYTES = 32 << 20
_NAME_BYTES = 120


class Replicas:
    """Workers that hold the same parameters, with what they do together outside of steps; all call it."""

    def __init__(self, endpoint: Endpoint, wait: Callable[[Work], None]) -> None:
        """`wait`: how to wait for one operation."""
        self._endpoint, self._wait = endpoint, wait
        self._rank, self._world_size = endpoint.lane.rank, endpoint.lane.world_size

    def sum_(self, data: Tensor) -> None:
        """Overwrite a tensor with its sum over workers."""
        self._wait(self._endpoint.issue(lambda wire: wire.all_reduce_(data)))

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of a few numbers over workers."""
        data = torch.tensor(values, dtype=torch.float64)
        self.sum_(data)
        return [float(value) for value in data]

    def _average_(self, data: Tensor) -> None:
        self.sum_(data)
        data /= self._world_size

    def _broadcast_(self, data: Tensor, source: int) -> None:
        self._wait(self._endpoint.issue(lambda wire: wire.broadcast_(data, source=source)))

    def _gather(self, data: Tensor) -> Tensor:
        """Every worker's flat tensor of one size: a row each, in order of rank."""
        work, everyones = self._endpoint.gather(data)
        self._wait(work)
        return everyones.view(self._world_size, data.numel())

    def gather_objects(self, value: Any) -> list[Any]:
        """Every worker's value, in order of rank, as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([data.numel()])).flatten()
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self._gather(padded)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]

    def meet(self, what: str) -> None:
        """Raise PeerDiffers, on every worker, unless all of them are about to do this: sizes that do not fit
        would end in the middle of a backend."""
        if self._world_size == 1:
            return
        told = decode_names(self._gather(encode_name(what)))
        for rank, other in enumerate(told):
            if other != told[0]:
                raise PeerDiffers(
                    f"worker {rank} is in {other} while worker 0 is in {told[0]}",
                    rank=rank,
                    hint="all workers call the methods of a link, and detach, in the same order",
                )

    def check_alike(self, lines: list[str]) -> None:
        """Raise PeerDiffers, on every worker, if one of them describes itself differently."""
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "big", signed=True)])
        if len(self._gather(mine).unique()) == 1:
            return
        everyones = self.gather_objects(lines)
        for rank, other in enumerate(everyones):
            for here, there in zip([*everyones[0], "nothing"], [*other, "nothing"], strict=False):
                if here != there:
                    raise PeerDiffers(
                        f"workers differ: rank 0 has '{here}' where rank {rank} has '{there}'",
                        rank=rank,
                        hint="build the same model, with the same settings and code, on every worker",
                    )
        raise AssertionError("digests differ and descriptions do not")

    def broadcast_tensors_(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite tensors of any dtype with those of worker `source`, as bytes."""
        _in_chunks_(tensors, lambda flat: self._broadcast_(flat.view(torch.uint8), source))

    def average_tensors_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite floating-point tensors with their mean over workers."""
        _in_chunks_(tensors, self._average_)

    @torch.no_grad()
    def consensus_distance(self, buckets: Sequence[ParameterBucket]) -> float:
        """Root mean square distance of the workers' parameters from their mean, relative to the mean."""
        sums = torch.zeros(2, dtype=torch.float64)  # squared distance, squared norm of the mean
        for bucket in buckets:
            mine = bucket.read()
            mean = mine.clone()
            self._average_(mean)
            sums[0] += float((mine - mean).double().square().sum())
            sums[1] += float(mean.double().square().sum())
        self.sum_(sums)
        return float((sums[0] / sums[1]).sqrt()) if sums[1] > 0 else 0.0

    def adopt_last(self, model: nn.Module, optimizers: Sequence[Optimizer], steps: int) -> int:
        """Take model and optimizers of the worker with the most steps, if they differ; gives its steps."""
        everyones = self._gather(torch.tensor([steps]))
        source, most = int(everyones.argmax()), int(everyones.max())
        if int(everyones.min()) < most:
            self.broadcast_tensors_([*model.parameters(), *model.buffers()], source)
            for optimizer in optimizers:
                state = self.broadcast_state(optimizer.state_dict(), source)
                if self._rank != source:
                    optimizer.load_state_dict(state)
        return most

    def broadcast_state(self, state: Any, source: int) -> Any:
        """Worker `source`'s tree of tensors and plain values, on every worker; nothing is unpickled."""
        data = torch.zeros(1, dtype=torch.uint8)
        if self._rank == source:
            data = tensors.pack(tensors.snapshot({"state": state}))
        length = torch.tensor([data.numel()])
        self._broadcast_(length, source)
        received = data if self._rank == source else torch.empty(int(length), dtype=torch.uint8)
        self._broadcast_(received, source)
        return tensors.unpack(received)["state"]


def encode_name(name: str) -> Tensor:
    """A text, cut to a fixed length, as bytes."""
    return torch.frombuffer(bytearray(name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)), dtype=torch.uint8)


def decode_names(rows: Tensor) -> list[str]:
    """The texts of several workers, one after another."""
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in rows.view(-1, _NAME_BYTES)]


def describe(named: Iterable[tuple[str, Tensor]], kind: str) -> list[str]:
    """Tensors as lines that must be the same on all workers."""
    return [
        f"{kind} {name} {tuple(local(t).shape)} {t.dtype}"
        + (" frozen" if kind == "parameter" and not t.requires_grad else "")
        for name, t in named
    ]


@torch.no_grad()
def _in_chunks_(tensors: Iterable[Tensor], overwrite_: Callable[[Tensor], None]) -> None:
    """Overwrite tensors by way of flat ones, a chunk at a time."""
    for group in chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in group])
        overwrite_(flat)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def chunks(tensors: Iterable[Tensor], *, mixed: bool = False) -> list[list[Tensor]]:
    """Tensors of one device, and one dtype unless `mixed`, up to a limit of bytes; empty ones left out."""
    filling: dict[tuple[torch.dtype | None, torch.device], list[Tensor]] = {}
    filled_bytes: Counter[tuple[torch.dtype | None, torch.device]] = Counter()
    full = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = None if mixed else tensor.dtype, tensor.device
        filling.setdefault(kind, []).append(tensor)
        filled_bytes[kind] += tensor.nbytes
        if filled_bytes[kind] >= _CHUNK_BYTES:
            full.append(filling.pop(kind))
            del filled_bytes[kind]
    return full + list(filling.values())
