"""The systems that are measured, ours and rivals, behind one interface; no torch until one is joined.

Rivals come from a module with a function `all_rivals()`: `--rivals MODULE` names it, by default it is the one
in the repository. This package knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from thinwire.errors import SettingError
from thinwire.imports import import_user_module, is_absent
from thinwire.strategies import registry
from thinwire.timings import BASELINE, CEILING, Family

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from thinwire.engine.link import Link
    from thinwire.strategies.base import Strategy

EXACT = "all-reduce"
"""Its accuracy sets the target of a study."""
RIVALS = "benchmarks.rivals"
"""The module that rivals are loaded from, relative to the current folder."""
HOW_TO_GET_RIVALS = "run from a checkout of thinwire's repository, or name a module with --rivals"
USUAL_PERIOD = 8
"""Least steps to time where replicas differ: such strategies may do something else in every step."""
_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("all-reduce", "all-reduce:overlap=forward"),
    "gossip-grad": ("gossip-grad", "gossip-grad:share=auto"),
    "sasgd": ("sasgd:interval=auto",),
    "diloco": ("diloco:fragments=5:delay=5",),
    "partial-averaging": (),
    "post-local": (),
    "hierarchical-averaging": (),
    "downpour": (),
    "easgd": (),
}
"""The settings that the standard grid has of a strategy, where these are not just the default ones; none of
those that are there to be compared with."""


class Rival(Protocol):
    """One way to train together that is not ours, with its settings.

    The caller initialises `torch.distributed` before `join`, and trains with the model and the optimizer that
    `join` returns: some systems wrap the one, some the other. All workers enter and leave together, and start
    from equal parameters.
    """

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def period(self) -> int:
        """The number of steps after which its traffic repeats; a measurement covers whole periods."""

    def available(self) -> str | None:
        """Why it cannot run here ("not installed: ..."), or None if it can."""

    def join(
        self, model: nn.Module, optimizer: Optimizer
    ) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """Make the loop in the `with` block distributed; leaving the block undoes it."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A strategy of ours as a system."""

    name: str
    strategy: Strategy
    bucket_bytes: int | None = None
    """None: the engine's own choice."""

    @property
    def period(self) -> int:
        own = int(getattr(self.strategy, "period", 1))
        talks_always = self.strategy.replicas_agree or self.name == CEILING
        return own if own > 1 or talks_always else USUAL_PERIOD

    @property
    def replicas_agree(self) -> bool:
        from thinwire.recipes.setup import talks

        return self.strategy.replicas_agree or not talks(self.strategy)

    @property
    def adapts_in(self) -> int:
        """The number of steps it takes to adapt to a network, before it is timed."""
        return self.strategy.adapts_in

    def available(self) -> str | None:
        return None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Link:
        from thinwire.engine.attach import attach

        return attach(model, optimizer, self.strategy, bucket_bytes=self.bucket_bytes)


System = Ours | Rival


def ours(name: str) -> Ours:
    """The system of a strategy, named as on every command line.

    >>> ours("all-reduce:overlap=forward").strategy.overlap
    'forward'
    """
    return Ours(name, registry.from_text(name))


def standard_names() -> list[str]:
    """Our side of the standard grid, the ceiling first."""
    names = [CEILING, *(name for name in registry.names() if name != CEILING)]
    return [variant for name in names for variant in _VARIANTS.get(name, (name,))]


def load_rivals(module: str | None) -> dict[str, System]:
    """The rivals of `module`; without one, those of the usual module, if the current folder has it."""
    name = module or RIVALS
    try:
        return dict(import_user_module(name, field=f"rivals {name!r}").all_rivals())
    except AttributeError:
        raise SettingError(f"rivals must be a module with all_rivals(), got {name!r}") from None
    except SettingError as error:
        if is_absent(error.__cause__, name):
            if module is None:
                return {}
            raise SettingError(f"rivals must be a module, got {name!r}", hint=HOW_TO_GET_RIVALS) from None
        raise


def choose(asked: Iterable[str] | None, rivals: Mapping[str, System]) -> list[str]:
    """Names of the systems to measure: all, or those asked for, the ceiling and the baseline."""
    if asked is None:
        return [*standard_names(), *rivals]
    names = list(dict.fromkeys([CEILING, *asked]))
    if BASELINE in rivals and BASELINE not in names:
        names.append(BASELINE)
    for name in names:
        find(name, rivals)
    return names


def find(name: str, rivals: Mapping[str, System]) -> System:
    """The system of this name; SettingError with the known ones if there is none."""
    if name in rivals:
        return rivals[name]
    strategy, _ = registry.parse(name)
    if strategy in registry.names() or ":" in strategy:
        return ours(name)
    known = ", ".join([*standard_names(), *rivals])
    hint = "" if rivals else f"no rivals were found: {HOW_TO_GET_RIVALS}"
    raise SettingError(f"systems must be among {known}, got {name!r}", hint=hint)


def family_of(system: System) -> Family:
    if system.name == CEILING:
        return "ceiling"
    return "ours" if isinstance(system, Ours) else "rival"
