"""What a checkpoint must have in common with a run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from thinwire.errors import DataError

_NAMED = 3
"""Differences that an error names; more are counted."""


def plain(model: nn.Module) -> nn.Module:
    """Without the wrapper of torch.compile, whose name would be in all keys."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Shapes and kinds, as text by name."""
    tensors = {
        **{f"parameter {name}": p for name, p in model.named_parameters()},
        **{f"buffer {name}": b for name, b in model.named_buffers()},
    }
    about = {name: f"{tuple(t.shape)} {t.dtype}".replace("torch.", "") for name, t in tensors.items()}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return {"optimizer": f"{type(optimizer).__name__} over {sizes} parameters", **about}


def compare(path: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise DataError, naming what differs between the training that was saved and this one."""
    differ = [
        f"{key} was {saved.get(key, 'not there')}, here it is {here.get(key, 'not there')}"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]
    if differ:
        more = f"; and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise DataError(
            f"{path} is of another training: {'; '.join(differ[:_NAMED])}{more}",
            hint="resume with what it was started with, or start a new run in another folder",
        )
