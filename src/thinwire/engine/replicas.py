"""The workers' copies of a model: checked, started alike, averaged, compared."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.buckets import ParameterBucket, local
from thinwire.errors import PeerDiffers
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work

Call = Callable[[Wire], Work]
Wait = Callable[[Call], None]
"""Waits for one operation on the engine's wire."""
_CHUNK_BYTES = 32 << 20


def describe(named: Iterable[tuple[str, Tensor]], kind: str) -> list[str]:
    """Tensors as lines that must be the same on all workers."""
    return [
        f"{kind} {name} {tuple(local(t).shape)} {t.dtype}"
        + (" frozen" if kind == "parameter" and not t.requires_grad else "")
        for name, t in named
    ]


def check_alike(lines: list[str], rank: int, world_size: int, wait: Wait) -> None:
    """Raise PeerDiffers, on every worker, if one of them describes itself differently."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    everyone = torch.empty(world_size, dtype=torch.int64)
    wait(lambda wire: wire.all_gather(mine, everyone))
    if len(set(everyone.tolist())) == 1:
        return
    texts = gather_bytes(json.dumps(lines).encode(), rank, world_size, wait)
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        other = json.loads(text)
        for here, there in zip([*first, "nothing"], [*other, "nothing"], strict=False):
            if here != there:
                raise PeerDiffers(
                    f"workers differ: rank 0 has '{here}' where rank {rank} has '{there}'",
                    rank=rank,
                    hint="build the same model, with the same settings and code, on every worker",
                )
    raise AssertionError("digests differ and descriptions do not")


def _sum_(data: Tensor, wait: Wait) -> None:
    wait(lambda wire: wire.all_reduce_(data))


def _broadcast_(data: Tensor, source: int, wait: Wait) -> None:
    wait(lambda wire: wire.broadcast_(data, source=source))


def gather_bytes(own: bytes, rank: int, world_size: int, wait: Wait) -> list[bytes]:
    """Every worker's bytes, in order of rank."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    lengths = torch.empty(world_size, dtype=torch.int64)
    wait(lambda wire: wire.all_gather(torch.tensor([data.numel()]), lengths))
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    everyone = torch.empty(world_size * longest, dtype=torch.uint8)
    wait(lambda wire: wire.all_gather(padded, everyone))
    rows = everyone.view(world_size, longest)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]


def broadcast_state(state: dict[str, Any], source: int, rank: int, wait: Wait) -> dict[str, Any]:
    """Worker `source`'s state dict, on every worker."""
    buffer = io.BytesIO()
    if rank == source:
        torch.save(state, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    _broadcast_(length, source, wait)
    received = data if rank == source else torch.empty(int(length), dtype=torch.uint8)
    _broadcast_(received, source, wait)
    loaded: dict[str, Any] = torch.load(io.BytesIO(received.numpy().tobytes()), weights_only=True)
    return loaded


@torch.no_grad()
def broadcast_tensors_(tensors: Iterable[Tensor], source: int, wait: Wait) -> None:
    """Overwrite tensors of any dtype with those of worker `source`, as bytes, a chunk at a time."""
    for group in chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1).contiguous().view(torch.uint8) for t in group])
        _broadcast_(flat, source, wait)
        parts = flat.split([t.nbytes for t in group])
        for tensor, part in zip(group, parts, strict=True):
            # clone: a slice of bytes need not be aligned for the tensor's dtype
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def average_tensors_(tensors: Iterable[Tensor], world_size: int, wait: Wait) -> None:
    """Overwrite floating-point tensors with their mean over workers."""
    for group in chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in group])
        _sum_(flat, wait)
        flat /= world_size
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def chunks(tensors: Iterable[Tensor], *, mixed: bool = False) -> list[list[Tensor]]:
    """Tensors of one device, and one dtype unless `mixed`, up to a limit of bytes; empty ones left out."""
    filling: dict[tuple[torch.dtype | None, torch.device], list[Tensor]] = {}
    filled_bytes: dict[tuple[torch.dtype | None, torch.device], int] = {}
    full = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = None if mixed else tensor.dtype, tensor.device
        filling.setdefault(kind, []).append(tensor)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + tensor.nbytes
        if filled_bytes[kind] >= _CHUNK_BYTES:
            full.append(filling.pop(kind))
            del filled_bytes[kind]
    return full + list(filling.values())


@torch.no_grad()
def consensus_distance(buckets: Sequence[ParameterBucket], world_size: int, wait: Wait) -> float:
    """Root mean square distance of the workers' parameters from their mean, relative to the mean."""
    sums = torch.zeros(2, dtype=torch.float64)  # squared distance, squared norm of the mean
    for bucket in buckets:
        mine = bucket.read()
        mean = mine.clone()
        _sum_(mean, wait)
        mean /= world_size
        sums[0] += float((mine - mean).double().square().sum())
        sums[1] += float(mean.double().square().sum())
    _sum_(sums, wait)
    return float((sums[0] / sums[1]).sqrt()) if sums[1] > 0 else 0.0


def adopt_last(
    model: nn.Module, optimizer: Optimizer, steps: int, rank: int, world_size: int, wait: Wait
) -> int:
    """Take model and optimizer of the worker that has done the most steps, if they differ; gives its
    steps."""
    everyones = torch.empty(world_size, dtype=torch.int64)
    wait(lambda wire: wire.all_gather(torch.tensor([steps]), everyones))
    source, most = int(everyones.argmax()), int(everyones.max())
    if int(everyones.min()) < most:
        broadcast_tensors_([*model.parameters(), *model.buffers()], source, wait)
        state = broadcast_state(optimizer.state_dict(), source, rank, wait)
        if rank != source:
            optimizer.load_state_dict(state)
    return most
