"""A model built at its full size takes the sizes of a checkpoint; and a plain copy for use elsewhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.apoptosis.surgery import named_tensors, replace_, resize_modules
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import DataError, MissingExtra


def rebuild(model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Tensor]) -> bool:
    """Give a model, as its code builds it, the layer widths and weights of a checkpoint that has shrunk.

    Args:
        model: built at full size; its parameters stay the same objects, so an optimizer may exist already
            as long as it has made no step.
        checkpoint: the folder of a `tw.Checkpoint`, or a state dict.

    Returns False, and changes nothing, if the folder holds no checkpoint yet. So a script calls it at every
    start, before it makes its optimizer and attaches.
    """
    if isinstance(checkpoint, Mapping):
        saved: Mapping[str, Tensor] = checkpoint
    elif not any(Path(checkpoint).glob("step-*")):
        return False
    else:
        saved = Checkpoint.read_model(checkpoint)
    set_shapes(model, saved)
    model.load_state_dict(saved)
    return True


@torch.no_grad()
def set_shapes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Make tensors as small as the saved ones of the same name."""
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if name not in saved:
            continue
        fits = tensor.dim() == saved[name].dim()
        if not fits or any(map(int.__lt__, tensor.shape, saved[name].shape)):
            raise DataError(
                f"{name} of the checkpoint is {tuple(saved[name].shape)}, larger than the model's "
                f"{tuple(tensor.shape)}",
                hint="build the model as it was built for the run that saved it",
            )
    for name, tensor in tensors.items():
        if name in saved and tensor.shape != saved[name].shape:
            replace_(tensor, tensor.new_zeros(saved[name].shape))
    resize_modules(model)


def export(model: nn.Module) -> nn.Module:
    """A plain copy of a model as it is now, on the CPU and in evaluation mode, without hooks or gradients:
    to save, to load elsewhere, or to compile."""
    model = getattr(model, "_orig_mod", model)
    memo: dict[int, Any] = {}
    for module in model.modules():  # hooks hold on to the link, which must not be copied
        for key, value in vars(module).items():
            if key.endswith("_hooks") or "_hooks_" in key:
                memo[id(value)] = type(value)()
    for parameter in model.parameters():
        plain = nn.Parameter(parameter.detach().cpu().clone(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = plain
    return copy.deepcopy(model, memo).cpu().eval()


def export_onnx(model: nn.Module, example: tuple[Any, ...], path: str | os.PathLike[str]) -> None:
    """Write a model as it is now to an ONNX file; `example`: arguments of one call."""
    try:
        import onnxscript  # noqa: F401 (torch.onnx needs it, and says so less clearly)
    except ImportError as error:
        raise MissingExtra("writing ONNX needs onnxscript", hint="pip install 'thinwire[onnx]'") from error
    torch.onnx.export(export(model), example, os.fspath(path), dynamo=True, verbose=False)
