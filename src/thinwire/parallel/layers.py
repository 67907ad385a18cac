"""Which layers of a model can be split, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.errors import SettingError, check
from thinwire.parallel.batches import EqualBatches
from thinwire.parallel.lstm import BatchColwiseLSTM
from thinwire.parallel.styles import BatchColwise, BatchRowwise
from thinwire.parallel.volumes import LayerSize, Split

_KINDS = (nn.Linear, nn.Embedding, nn.LSTM)
_RULE = "an nn.Linear, nn.Embedding or nn.LSTM"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer that can be split."""

    name: str
    module: nn.Module

    def sizes(self, rows: float) -> list[LayerSize]:
        """Its matrices, with this many rows per worker and step."""
        module = self.module
        if isinstance(module, nn.LSTM):
            outputs = module.proj_size or module.hidden_size
            ins = [module.input_size, *[outputs] * (module.num_layers - 1)]
            matrices = [(n, 4 * module.hidden_size, 4 * module.hidden_size * (n + module.bias)) for n in ins]
        elif isinstance(module, nn.Embedding):
            matrices = [(0, module.embedding_dim, module.num_embeddings * module.embedding_dim)]
        else:
            assert isinstance(module, nn.Linear)
            inputs, out = module.in_features, module.out_features
            matrices = [(inputs, out, out * (inputs + (module.bias is not None)))]
        number_bytes = next(module.parameters()).element_size()
        return [
            LayerSize(in_features=i, out_features=o, num_weights=n, rows=rows, number_bytes=number_bytes)
            for i, o, n in matrices
        ]

    @property
    def split(self) -> Split:
        """The way of splitting it that sends less."""
        return self.sizes(1.0)[0].better_split if isinstance(self.module, nn.Linear) else "colwise"

    @property
    def num_features(self) -> int:
        """That are dealt out to the workers of a group."""
        size = self.sizes(1.0)[0]
        return size.in_features if self.split == "rowwise" else size.out_features

    def style(self, batches: EqualBatches | None = None) -> ParallelStyle:
        if isinstance(self.module, nn.LSTM):
            return BatchColwiseLSTM(self.name, batches)
        kind = BatchRowwise if self.split == "rowwise" else BatchColwise
        return kind(self.name, batches)

    def input_rows(self, input: Tensor) -> float:
        """Rows in an input of the layer."""
        if isinstance(self.module, nn.Embedding):
            return input.numel()
        width = self.module.input_size if isinstance(self.module, nn.LSTM) else self.module.in_features
        assert isinstance(width, int)
        return input.numel() / width

    def has_strips(self, size: int) -> bool:
        """Whether every worker of a group gets some of its features."""
        width = math.ceil(self.num_features / size)
        return width * (size - 1) < self.num_features


def candidates(model: nn.Module) -> list[Candidate]:
    """All layers of a model that can be split."""
    owners = _owners(model)
    return [
        Candidate(name, module)
        for name, module in model.named_modules()
        if not _fault(module, name, model, owners)
    ]


def named_layers(model: nn.Module, layers: Sequence[str]) -> list[Candidate]:
    """The layers of these names or patterns; one that cannot be split is refused by name."""
    owners = _owners(model)
    modules = dict(model.named_modules())
    found: dict[str, Candidate] = {}
    for key in layers:
        matching = [name for name in modules if name == key or fnmatchcase(name, key)]
        known = [candidate.name for candidate in candidates(model)]
        hint = f"layers that can be split: {', '.join(known) or 'none'}"
        check(
            bool(matching),
            "layers",
            "names of the model's layers, or patterns such as 'head.*'",
            key,
            hint=hint,
        )
        pattern = matching != [key]
        for name in matching:
            fault = _fault(modules[name], name, model, owners)
            if not fault:
                found[name] = Candidate(name, modules[name])
            elif not pattern:
                raise SettingError(f"layers: {name} cannot be split: {fault}", hint=hint)
        check(any(name in found for name in matching), "layers", f"{_RULE}", key, hint=hint)
    return list(found.values())


@torch.no_grad()
def count_rows(model: nn.Module, layers: Sequence[Candidate], example: Any) -> dict[str, float]:
    """Rows that go through each layer in one forward of an example; in eval mode, so that nothing changes."""
    rows: dict[str, float] = {}

    def look(candidate: Candidate, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows[candidate.name] = rows.get(candidate.name, 0.0) + candidate.input_rows(inputs[0])

    handles = [each.module.register_forward_pre_hook(partial(look, each)) for each in layers]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return rows


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """By parameter: the names it has."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _fault(module: nn.Module, name: str, model: nn.Module, owners: dict[int, list[str]]) -> str:
    """Why a layer cannot be split; empty if it can."""
    return next(_faults(module, name, model, owners), "")


def _faults(module: nn.Module, name: str, model: nn.Module, owners: dict[int, list[str]]) -> Iterator[str]:
    kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
    if kind is None:
        # torch would take a convolution as a DTensor sharded by channel, and compute all of it everywhere
        yield f"a {type(module).__name__} is not {_RULE}"
        return
    if type(module).forward is not kind.forward:
        yield f"{type(module).__name__} has a forward of its own"
    if "parametrizations" in dict(module.named_children()):
        yield "its weight is made by a parametrization"
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        yield "nn.MultiheadAttention uses its weight without calling it"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm or module.scale_grad_by_freq):
        yield "sparse, max_norm and scale_grad_by_freq need the whole table"
    if isinstance(module, nn.LSTM) and module.bidirectional:
        yield "it is bidirectional"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            yield "it is split already"
        if len(owners[id(parameter)]) > 1:
            yield f"its weight is tied: {' and '.join(owners[id(parameter)])}"
