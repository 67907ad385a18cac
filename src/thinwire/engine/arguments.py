"""What attach is given: refused in words where it cannot be attached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.engine.buckets import local
from thinwire.engine.sparse_rows import sparse_parameters
from thinwire.engine.strips import check_elementwise
from thinwire.errors import SettingError, UsageError, check, check_count, check_seconds
from thinwire.strategies.all_reduce import AllReduce
from thinwire.strategies.base import Strategy
from thinwire.wire.tls.files import TLS, Contexts, load

# By name: importing them only to compare would cost every user a second at the start.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}

linked = WeakTensorKeyDictionary()
"""Parameters that have a link. Only one: two would both send, and step, the same gradients. Weak, as a model
that is gone needs no detach."""

_ORDER = (
    "the order is tw.attach(model, optimizer, strategy), for example tw.attach(model, sgd, tw.AllReduce())"
)
_UNWRAPPED = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
"""Libraries whose optimizers call the step of their `.optimizer`, and change no parameters themselves."""


def check_training(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], strategy: Strategy
) -> list[Optimizer]:
    """Refuse what is no model, optimizer or strategy; gives the optimizers whose steps count."""
    _check_model(model)
    optimizers = _unwrapped(optimizer)
    _check_strategy(strategy)
    return optimizers


def check_numbers(
    bucket_bytes: int | None, timeout_s: float, silence_s: float, num_steps: int | None
) -> None:
    """Refuse sizes and times that cannot be."""
    if bucket_bytes is not None:
        check_count("bucket_bytes", bucket_bytes, "bytes")
    check_seconds("timeout_s", timeout_s)
    check_seconds("silence_s", silence_s)
    check(silence_s >= 1, "silence_s", "1 or more seconds", silence_s)
    if num_steps is not None:
        check_count("num_steps", num_steps, "steps")


def check_held(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Refuse parameters that cannot be trained, and optimizers that hold others than the model's."""
    _check_parameters(model)
    _check_optimizers(optimizers, model, strategy)


def _check_strategy(strategy: Strategy) -> None:
    if isinstance(strategy, type) or not hasattr(strategy, "replicas_agree"):
        raise SettingError(f"strategy must be a strategy object, got {_shown(strategy)}", hint=_ORDER)


def _shown(value: object) -> str:
    """A wrong argument in a few words: a model can fill a page."""
    if isinstance(value, str | int | float | type | None):
        return repr(value)
    return f"a {type(value).__name__}"


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise SettingError(f"model must be a torch.nn.Module, got {_shown(model)}", hint=_ORDER)
    for name, module in model.named_modules():
        wrappers = _WRAPPERS & {base.__name__ for base in type(module).__mro__}
        if wrappers:
            raise UsageError(
                f"{name or 'the model'} is already wrapped in {wrappers.pop()}",
                hint="attach the plain model: thinwire takes the place of that wrapper",
            )


def _check_parameters(model: nn.Module) -> None:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise SettingError("model has no parameter that requires a gradient")
    for name, parameter in trained:
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"parameter {name} has no shape yet: its module is lazy",
                hint="pass one batch through the model before attach, and make the optimizer after that",
            )
        if parameter in linked:
            raise UsageError(
                f"parameter {name} is already attached",
                hint="detach that link first, by link.detach() or by leaving its `with` block",
            )


def _unwrapped(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers whose steps count, without what other libraries wrap around them."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    check(bool(several), "optimizer", "at least one", given)
    found = []
    for optimizer in several:
        if type(optimizer).__module__.split(".")[0] in _UNWRAPPED:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # what it wraps
        if not isinstance(optimizer, Optimizer):
            raise SettingError(
                f"optimizer must be a torch.optim.Optimizer, or a list of them, got {_shown(optimizer)}",
                hint=_ORDER,
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise SettingError(
                f"optimizer {type(optimizer).__name__} has no step hooks: it never called Optimizer.__init__",
                hint="pass the torch.optim optimizer that it wraps, if that one's step() is all it does",
            )
        found.append(optimizer)
    return found


def check_sharded(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Refuse by name what cannot be updated strip by strip."""
    check_elementwise(optimizers)
    if not isinstance(strategy, AllReduce) or strategy.overlap == "forward":
        raise SettingError(
            f"sharded=True needs AllReduce() with overlap 'backward' or 'none', got {strategy!r}",
            hint="other strategies need all gradients, or change parameters, on every worker",
        )
    if names := sorted(sparse_parameters(model)):
        raise SettingError(
            f"sharded=True cannot cut sparse gradients, as {names[0]} has",
            hint="make the embedding with sparse=False",
        )


def _check_optimizers(optimizers: Sequence[Optimizer], model: nn.Module, strategy: Strategy) -> None:
    held = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
    if len(set(held)) < len(held):
        raise SettingError(
            "optimizer must be several with parameters of their own, got some that share a parameter",
            hint="give each parameter to one of them",
        )
    strange = len(set(held) - {id(p) for p in model.parameters()})
    if strange:
        raise SettingError(
            f"optimizer holds {strange} parameter(s) that are not in the model, so nobody would send them",
            hint="attach one module that holds all of them, for example an nn.ModuleList",
        )
    others = sum(p.requires_grad and id(p) not in set(held) for p in model.parameters())
    if others and strategy.overlap == "forward":
        warnings.warn(
            f"{others} parameter(s) of the model require a gradient and are not in the optimizer; "
            "overlap='forward' leaves no gradient for another one (freeze them if nobody trains them)",
            stacklevel=4,
        )


def check_wire(wire: object, process_group: object, key_file: str, model: nn.Module) -> Contexts | None:
    """What TLS connections are made with, if they are asked for."""
    named = isinstance(wire, TLS) or wire in ("plain", "tls")
    check(named, "wire", "'plain', 'tls' or TLS(file=...)", wire)
    if wire == "plain":
        return None
    ours = process_group is None or isinstance(process_group, dist.ProcessGroup)
    check(ours, "wire", "'plain' on a lane of your own", wire)
    if name := next((name for name, p in model.named_parameters() if local(p) is not p), ""):
        raise UsageError(
            f"wire='tls' cannot encrypt the activations of {name}, which is split",
            hint="do not split layers, or encrypt the network underneath, as WireGuard does",
        )
    return load((wire if isinstance(wire, TLS) else TLS()).path(key_file))


def check_elastic(strategy: Strategy, process_group: object, replica_ranks: object, model: nn.Module) -> None:
    """Refuse what cannot go on with other workers."""
    if strategy.overlap == "forward":
        raise UsageError(
            "an elastic link cannot put steps off: a worker that is lost would leave half of one behind",
            hint="use AllReduce(overlap='backward')",
        )
    check(process_group is None, "process_group", "left out where elastic=True", process_group)
    split = any(hasattr(p, "_local_tensor") for p in model.parameters())
    whole = not replica_ranks and not split
    check(whole, "replica_ranks", "left out, and no DTensor in the model, where elastic=True", replica_ranks)
