"""Watches forward: tells which bucket is needed next, just before the module that uses it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from thinwire.engine.buckets import ParameterBucket
from thinwire.errors import UsageError


class ForwardHooks:
    """Calls `need` with the buckets of a module before its forward.

    A module's own parameters are needed when it is called; a tied parameter with each of its owners.
    What forward uses before its owner was called (a weight used by another module's code) is found
    in the first training forward, and from then on needed as soon as any module is called.
    """

    def __init__(
        self, model: nn.Module, buckets: Sequence[ParameterBucket], need: Callable[[Iterable[int]], None]
    ) -> None:
        if is_compiled(model):
            raise UsageError(
                "overlap='forward' cannot see into a model that is compiled as a whole",
                hint="compile it block by block, or use AllReduce(overlap='backward')",
            )
        self.order: list[int] = []
        """Buckets in the order the first training forward needed them."""
        self._need = need
        self._model = model
        self._bucket_of = {id(p): bucket.place for bucket in buckets for p in bucket.parameters}
        self._early: set[int] = set()
        self._looked = False
        self._depth = 0
        self.handles: list[RemovableHandle] = []
        self._mode: _Uses | None = None

    def hook(self) -> None:
        owned: dict[nn.Module, set[int]] = {}
        self._collect(self._model, self._model, False, owned)
        for module, indices in owned.items():
            hook = partial(self._before, sorted(indices))
            self.handles.append(module.register_forward_pre_hook(hook, prepend=True))
        if not any(is_compiled(module) for module in self._model.modules()):
            look = self._model.register_forward_pre_hook(self._start_looking, prepend=True)
            done = self._model.register_forward_hook(self._stop_looking, always_call=True)
            self.handles += [look, done]
        else:
            self._looked = True  # a compiled block would be traced with our eyes in it

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _collect(
        self, module: nn.Module, caller: nn.Module, hidden: bool, owned: dict[nn.Module, set[int]]
    ) -> None:
        """Which module's call comes before each bucket's use: the owner's, or, since hooks inside
        compiled code do not fire, that of the compiled block or of whoever calls it."""
        if _is_wrapper(module):
            hidden, target = True, module  # its own hooks fire, those of what it wraps do not
        else:
            hidden = hidden or is_compiled(module)  # compiled in place: not even its own fire
            target = caller if hidden else module
        mine = [id(p) for p in module.parameters(recurse=False) if id(p) in self._bucket_of]
        if mine:
            owned.setdefault(target, set()).update(self._bucket_of[p] for p in mine)
        for child in module.children():
            self._collect(child, target, hidden, owned)

    def _before(self, indices: list[int], *_: Any) -> None:
        if not self._looked and torch.is_grad_enabled():
            self.order += [i for i in indices if i not in self.order]
        self._need([*self._early, *indices] if self._early else indices)

    def _start_looking(self, *_: Any) -> None:
        if self._looked:
            return
        if self._mode is None and self._model.training and torch.is_grad_enabled():
            self.order.clear()
            self._mode, self._depth = _Uses(self._bucket_of, self.order, self._early), 0
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1  # a model may call itself

    def _stop_looking(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._mode is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode, self._looked = None, output is not None  # None: it raised, and was not seen through


class _Uses(TorchFunctionMode):
    """Notes the buckets whose parameters are used before their owner was called."""

    def __init__(self, bucket_of: dict[int, int], called: list[int], early: set[int]) -> None:
        super().__init__()
        self._bucket_of = bucket_of
        self._called = called
        self._early = early

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                index = self._bucket_of.get(id(leaf))
                if index is not None and index not in self._called:
                    self._early.add(index)
                    self._called.append(index)
        return func(*args, **(kwargs or {}))


def _is_wrapper(module: nn.Module) -> bool:
    """What torch.compile(module) returns; module.compile() marks the module itself."""
    return type(module).__name__ == "OptimizedModule"


def is_compiled(module: nn.Module) -> bool:
    return _is_wrapper(module) or module._compiled_call_impl is not None
