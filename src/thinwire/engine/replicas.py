"""What the workers' copies of a model have in common: checked, started alike, averaged, compared."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.buckets import ParameterBucket
from thinwire.errors import PeerDiffers
from thinwire.wire.base import Wire, Work

Wait = Callable[[Work], None]
_CHUNK_BYTES = 32 << 20


def describe(model: nn.Module, settings: dict[str, str]) -> list[str]:
    """The model and settings as lines that must be the same on all workers."""
    lines = [f"{key} {value}" for key, value in settings.items()]
    for name, p in model.named_parameters():
        frozen = "" if p.requires_grad else " frozen"
        lines.append(f"parameter {name} {tuple(p.shape)} {p.dtype}{frozen}")
    lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return lines


def check_alike(lines: list[str], wire: Wire, wait: Wait) -> None:
    """Raise PeerDiffers, on every worker, if one of them describes itself differently."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    everyone = torch.empty(wire.world_size, dtype=torch.int64)
    wait(wire.all_gather(mine, everyone))
    if len(set(everyone.tolist())) == 1:
        return
    texts = gather_texts(json.dumps(lines), wire, wait)
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


def gather_texts(text: str, wire: Wire, wait: Wait) -> list[str]:
    """Every worker's text, in order of rank."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = torch.empty(wire.world_size, dtype=torch.int64)
    wait(wire.all_gather(torch.tensor([data.numel()]), lengths))
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    everyone = torch.empty(wire.world_size * longest, dtype=torch.uint8)
    wait(wire.all_gather(padded, everyone))
    rows = everyone.view(wire.world_size, longest)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]


def broadcast_state(state: dict[str, Any], source: int, wire: Wire, wait: Wait) -> dict[str, Any]:
    """Worker `source`'s state dict, on every worker."""
    buffer = io.BytesIO()
    if wire.rank == source:
        torch.save(state, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    wait(wire.broadcast_(length, source=source))
    if wire.rank != source:
        data = torch.empty(int(length), dtype=torch.uint8)
    wait(wire.broadcast_(data, source=source))
    loaded: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return loaded


@torch.no_grad()
def broadcast_tensors_(tensors: Iterable[Tensor], source: int, wire: Wire, wait: Wait) -> None:
    """Overwrite tensors of any dtype with those of worker `source`, as bytes, a chunk at a time."""
    for group in chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1).contiguous().view(torch.uint8) for t in group])
        wait(wire.broadcast_(flat, source=source))
        parts = flat.split([t.nbytes for t in group])
        for tensor, part in zip(group, parts, strict=True):
            # clone: a slice of bytes need not be aligned for the tensor's dtype
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def average_tensors_(tensors: Iterable[Tensor], wire: Wire, wait: Wait) -> None:
    """Overwrite floating-point tensors with their mean over workers."""
    for group in chunks(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in group])
        wait(wire.all_reduce_(flat))
        flat /= wire.world_size
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
def consensus_distance(buckets: Sequence[ParameterBucket], wire: Wire, wait: Wait) -> float:
    """Root mean square distance of the workers' parameters from their mean, relative to the mean."""
    sums = torch.zeros(2, dtype=torch.float64)  # squared distance, squared norm of the mean
    for bucket in buckets:
        mine = bucket.read()
        mean = mine.clone()
        wait(wire.all_reduce_(mean))
        mean /= wire.world_size
        sums[0] += float((mine - mean).double().square().sum())
        sums[1] += float(mean.double().square().sum())
    wait(wire.all_reduce_(sums))
    return float((sums[0] / sums[1]).sqrt()) if sums[1] > 0 else 0.0


def averageable(model: nn.Module) -> list[Tensor]:
    """Its parameters and floating-point buffers."""
    return [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def adopt_last(model: nn.Module, optimizer: Optimizer, steps: int, wire: Wire, wait: Wait) -> int:
    """Take model and optimizer of the worker that has done the most steps, if they differ; its steps."""
    everyones = torch.empty(wire.world_size, dtype=torch.int64)
    wait(wire.all_gather(torch.tensor([steps]), everyones))
    source, most = int(everyones.argmax()), int(everyones.max())
    if int(everyones.min()) < most:
        broadcast_tensors_([*model.parameters(), *model.buffers()], source, wire, wait)
        state = broadcast_state(optimizer.state_dict(), source, wire, wait)
        if wire.rank != source:
            optimizer.load_state_dict(state)
    return most
