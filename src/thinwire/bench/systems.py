"""What is measured: one interface for our strategies and for rivals; no torch until something is joined.

A rival is a value with a name, in a module that has `all_rivals()`. This package knows none of them by name:
`--rivals MODULE` names the module, which by default is the one that comes with the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from thinwire.errors import SettingError
from thinwire.strategies import registry
from thinwire.strategies.base import Strategy, overrides

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from thinwire.engine.link import Link

CEILING = "silent"
"""Sends nothing: what every other system's speed is held against."""
EXACT = "all-reduce"
"""Sets the target of a study."""
BASELINE = "ddp"
"""The rival everybody knows."""
RIVALS = "benchmarks.rivals"
"""Where rivals are looked for, seen from the current folder."""
HOW_TO_GET_RIVALS = "run from a checkout of thinwire's repository, or name a module with --rivals"
USUAL_PERIOD = 8
"""Replicas that differ talk now and then: so many steps show a whole turn of that."""
_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("all-reduce", "all-reduce:overlap=forward"),
    "gossip-grad": ("gossip-grad", "gossip-grad:share=auto", "gossip-grad:asynchronous=true"),
}
"""Strategies of which the standard grid has other settings than the default ones, or more."""

Family = Literal["ceiling", "ours", "rival"]


class System(Protocol):
    """One way to train together, with its settings.

    `torch.distributed` is initialised before `join`, by the caller. Inside, the caller uses what `join` hands
    out: some systems wrap the model, some the optimizer. All workers enter and leave together, and start from
    equal parameters.
    """

    @property
    def name(self) -> str:
        """How tables call it."""
        ...

    @property
    def period(self) -> int:
        """Steps after which its traffic repeats itself; a measurement covers whole periods."""
        ...

    def available(self) -> str | None:
        """Why it cannot run here ("not installed: ..."), or None if it can."""
        ...

    def join(
        self, model: nn.Module, optimizer: Optimizer
    ) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """Make the loop in the `with` block distributed; leaving it takes everything off again."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """A strategy of ours as a system."""

    name: str
    strategy: Strategy

    @property
    def period(self) -> int:
        talks_always = self.strategy.replicas_agree or self.name == CEILING
        return 1 if talks_always else USUAL_PERIOD

    @property
    def replicas_agree(self) -> bool:
        talks = overrides(self.strategy, "reduce") or overrides(self.strategy, "mix")
        return self.strategy.replicas_agree or not talks

    @property
    def adapts_in(self) -> int:
        """Steps that it takes to adapt to a wire, before it is timed."""
        return self.strategy.adapts_in

    def available(self) -> str | None:
        return None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Link:
        from thinwire.engine.attach import attach

        return attach(model, optimizer, self.strategy)

    @contextmanager
    def join(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        with self.attach(model, optimizer):
            yield model, optimizer


def ours(name: str) -> Ours:
    """The system `strategy` or `strategy:key=value:key=value`.

    >>> ours("all-reduce:overlap=forward").strategy.overlap
    'forward'
    """
    return Ours(name, registry.build(*registry.parse(name)))


def standard_names() -> list[str]:
    """Our side of the standard grid: every strategy there is, the ceiling first."""
    names = [CEILING, *(name for name in registry.names() if name != CEILING)]
    return [variant for name in names for variant in _VARIANTS.get(name, (name,))]


def load_rivals(module: str | None) -> dict[str, System]:
    """The rivals of `module`; of the usual one if it can be found from the current folder, else none."""
    here = str(Path.cwd())
    if here not in sys.path:  # the script `thinwire` does not look for modules where the user is
        sys.path.insert(0, here)
    name = module or RIVALS
    try:
        return dict(import_module(name).all_rivals())
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        if module is None:
            return {}
        raise SettingError(f"rivals must be a module, got {name!r}", hint=HOW_TO_GET_RIVALS) from None
    except AttributeError:
        raise SettingError(f"rivals must be a module with all_rivals(), got {name!r}") from None


def choose(asked: Iterable[str] | None, rivals: Mapping[str, System]) -> list[str]:
    """Names of the systems to measure: all, or those asked for and what they are held against."""
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
    if name.split(":")[0] in registry.names():
        return ours(name)
    known = ", ".join([*standard_names(), *rivals])
    hint = "" if rivals else f"no rivals were found: {HOW_TO_GET_RIVALS}"
    raise SettingError(f"systems must be among {known}, got {name!r}", hint=hint)


def family_of(system: System) -> Family:
    if system.name == CEILING:
        return "ceiling"
    return "ours" if isinstance(system, Ours) else "rival"
