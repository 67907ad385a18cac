"""Notices who handles a model or an optimizer as a whole: state dicts, copies, files, zero_grad.

What is under way must be finished before anybody else takes the whole: steps that overlap="forward" has put
off, exchanges of parameters in the air. Where torch has no hook, an attribute of the one object stands before
its class's method; copies and files get none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError

_GETSTATE, _ZERO_GRAD, _PARAMETERS = "__getstate__", "zero_grad", "named_parameters"
_OURS = (_GETSTATE, _ZERO_GRAD, _PARAMETERS)
_Owner = nn.Module | Optimizer


class StateAccessHooks:
    """Calls `finish` before model or optimizer are saved, loaded or copied; with `drop`, which is called at
    zero_grad, also before anybody is given the parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        finish: Callable[[], None],
        drop: Callable[[], None] | None = None,
        owner_of_gradients: str = "overlap='forward'",
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._finish, self._drop = finish, drop
        self._owner_of_gradients = owner_of_gradients
        self._handles: list[RemovableHandle] = []
        self._overrides: list[tuple[_Owner, str]] = []
        self._hidden: set[int] = set()

    def hook(self, others: Sequence[RemovableHandle]) -> None:
        """`others`: hooks besides these that a copy of the model must not have."""
        owners: list[_Owner] = [*self._model.modules(), *self._optimizers]
        for owner in owners:
            self._handles.append(owner.register_state_dict_pre_hook(lambda *_: self._finish()))
            self._handles.append(owner.register_load_state_dict_pre_hook(lambda *_: self._finish()))
            self._override(owner, _GETSTATE, partial(self._copied, owner))
        if self._drop is not None:
            whole: list[_Owner] = [self._model, *self._optimizers]
            for owner in whole:
                self._override(owner, _ZERO_GRAD, partial(self._zero_grad, owner, self._drop))
            # a method, as torch.compile asks for its function
            self._override(self._model, _PARAMETERS, MethodType(self._named, self._model))
        self._hidden = {handle.id for handle in (*self._handles, *others)}

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        for owner, name in self._overrides:
            owner.__dict__.pop(name, None)
        self._handles.clear()
        self._overrides.clear()

    def _override(self, owner: _Owner, name: str, instead: Callable[..., Any]) -> None:
        owner.__dict__[name] = instead  # not setattr, which compiled modules pass on
        self._overrides.append((owner, name))

    def _copied(self, owner: _Owner) -> Any:
        """What pickle and deepcopy take: the finished state, without anything of ours."""
        self._finish()
        state = type(owner).__getstate__(owner)  # type: ignore[arg-type]  # each its own
        if not isinstance(state, dict):
            return state
        plain = {name: value for name, value in state.items() if name not in _OURS}
        for name, hooks in plain.items():
            if "_hooks" in name and isinstance(hooks, dict):
                plain[name] = type(hooks)((key, h) for key, h in hooks.items() if key not in self._hidden)
        return plain

    def _named(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters()` too: a moving average, a norm that is printed."""
        self._finish()
        return type(module).named_parameters(module, *args, **kwargs)

    def _zero_grad(self, owner: _Owner, drop: Callable[[], None], set_to_none: bool = True) -> None:
        if not set_to_none:
            raise UsageError(
                f"{self._owner_of_gradients} keeps no gradients that could be set to zero",
                hint="call zero_grad() without set_to_none=False",
            )
        drop()
        type(owner).zero_grad(owner)  # type: ignore[arg-type]  # each its own
