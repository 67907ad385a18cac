"""Strategies by name: list them, describe their settings, build one from text.

On every command line a strategy is written `NAME:KEY=VALUE:KEY=VALUE`. NAME is a name listed here, or
`module:Class` of a class of the user's own. Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from thinwire.errors import SettingError, check
from thinwire.imports import did_you_mean, import_object
from thinwire.strategies.settings import hint_of, parse_value, type_text

if TYPE_CHECKING:
    from thinwire.strategies.base import Strategy

# A new strategy is one more line here.
_KNOWN: Mapping[str, str] = {
    "silent": "thinwire.strategies.silent:Silent",
    "all-reduce": "thinwire.strategies.all_reduce:AllReduce",
    "gossip-grad": "thinwire.strategies.gossip_grad:GossipGraD",
    "stochastic-gradient-push": "thinwire.strategies.stochastic_gradient_push:StochasticGradientPush",
    "topk": "thinwire.strategies.topk:TopK",
    "gtopk": "thinwire.strategies.gtopk:GTopK",
    "oktopk": "thinwire.strategies.oktopk:OkTopK",
    "sasgd": "thinwire.strategies.sasgd:SASGD",
    "diloco": "thinwire.strategies.diloco:DiLoCo",
    "trickle": "thinwire.strategies.trickle:Trickle",
    "partial-averaging": "thinwire.strategies.partial_averaging:PartialAveraging",
    "post-local": "thinwire.strategies.post_local:PostLocal",
    "hierarchical-averaging": "thinwire.strategies.hierarchical_averaging:HierarchicalAveraging",
    "downpour": "thinwire.strategies.downpour:Downpour",
    "easgd": "thinwire.strategies.easgd:EASGD",
}
EXAMPLES = "for example all-reduce:overlap=none, or my_module:MyStrategy:interval=4"


class SettingInfo(NamedTuple):
    """One field of a strategy."""

    name: str
    type: str
    default: str | None
    """The default as it would be written; None if the setting must be given."""
    doc: str


class StrategyInfo(NamedTuple):
    """The entry of a strategy in `thinwire strategies`."""

    summary: str
    settings: list[SettingInfo]


def names() -> tuple[str, ...]:
    """The names of all strategies."""
    return tuple(_KNOWN)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Split `NAME:KEY=VALUE:KEY=VALUE` into name and settings, without looking either up.

    >>> parse("all-reduce:overlap=none")
    ('all-reduce', {'overlap': 'none'})
    >>> parse("my_module:MyStrategy:interval=4")
    ('my_module:MyStrategy', {'interval': '4'})
    """
    name, *pairs = text.strip().split(":")
    if pairs and "=" not in pairs[0] and name not in _KNOWN:
        name = f"{name}:{pairs.pop(0)}"
    settings: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        check(bool(separator), "strategy", "NAME or NAME:KEY=VALUE:KEY=VALUE", text, hint=EXAMPLES)
        check(key not in settings, f"setting {key!r}", "given once", text)
        settings[key] = value
    return name, settings


def from_text(text: str) -> Strategy:
    """Build the strategy written as `NAME:KEY=VALUE:KEY=VALUE`."""
    return build(*parse(text))


def load(name: str) -> type[Strategy]:
    """The class of a strategy: one that is known by `name`, or the user's own `module:Class`."""
    if name not in _KNOWN and ":" not in name:
        otherwise = "`thinwire strategies` lists them with their settings"
        raise SettingError(
            f"strategy must be one of {', '.join(_KNOWN)} or module:Class, got {name!r}",
            hint=did_you_mean(name.lower().replace("_", "-"), _KNOWN, otherwise=otherwise),
        )
    loaded = import_object(_KNOWN.get(name, name), field="strategy")
    from thinwire.strategies.base import Strategy

    # the base is a protocol with attributes, for which issubclass() is not defined
    if not (is_dataclass(loaded) and Strategy in getattr(loaded, "__mro__", ())):
        kind = f"the class {loaded.__name__}" if isinstance(loaded, type) else f"a {type(loaded).__name__}"
        raise SettingError(
            f"strategy {name!r} must be a dataclass derived from Strategy, got {kind}",
            hint="docs/architecture.md describes how a strategy is written",
        )
    return cast("type[Strategy]", loaded)


def build(name: str, settings: Mapping[str, object] | None = None) -> Strategy:
    """Build a strategy; a setting given as text is read by the type of its field, other values are kept."""
    cls = load(name)
    known = {field.name: field for field in _fields(cls)}
    values: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        field = known.get(key.replace("-", "_"))
        if field is None:
            raise SettingError(f"{name} has no setting {key!r}", hint=_known_settings(name))
        values[field.name] = _read(hint_of(field, cls), f"{cls.__name__}.{field.name}", value)
    for field in known.values():
        if field.name not in values and _default_text(field) is None:
            raise SettingError(f"{name} needs the setting {field.name!r}", hint=_known_settings(name))
    try:
        return cls(**values)
    except SettingError:
        raise
    except (TypeError, ValueError) as error:  # from the __post_init__ of a user's own class
        raise SettingError(f"{name} refuses its settings: {error}", hint=_known_settings(name)) from error


def resolved(strategy: Strategy) -> dict[str, object]:
    """The settings of a strategy, defaults included, in a form that `build` accepts.

    Values that cannot be written as text are left out: no command line can have changed them.
    """
    values = {field.name: getattr(strategy, field.name) for field in _fields(type(strategy))}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)}


def describe(name: str) -> StrategyInfo:
    """The summary of a strategy, and its settings with their types, defaults and docs."""
    cls = load(name)
    docs = _field_docs(cls)
    settings = [
        SettingInfo(
            field.name, type_text(hint_of(field, cls)), _default_text(field), docs.get(field.name, "")
        )
        for field in _fields(cls)
    ]
    return StrategyInfo((inspect.getdoc(cls) or "").split("\n", 1)[0], settings)


def _fields(cls: type[Strategy]) -> list[Field[Any]]:
    return [field for field in fields(cast("Any", cls)) if field.init]


def _known_settings(name: str) -> str:
    settings = "; ".join(f"{s.name} ({s.type}): {s.doc}" for s in describe(name).settings)
    return f"it has {settings}" if settings else f"{name} has no settings"


@functools.cache
def _field_docs(cls: type) -> Mapping[str, str]:
    """The string under each field, own and inherited; Python itself does not keep them."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not is_dataclass(each):  # object, Protocol and Generic: finding their sources takes half a second
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):  # frozen, or typed at a prompt: there is no source
            continue
        for pair in pairwise(cast("ast.ClassDef", tree.body[0]).body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field] = " ".join(text.split())
    return docs


def _read(hint: Any, name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_value(hint, value)
    except (ValueError, KeyError):
        raise SettingError(f"{name} must be {type_text(hint)}, got {value!r}") from None


def _default_text(field: Field[Any]) -> str | None:
    if field.default_factory is not MISSING:
        return str(field.default_factory())
    if field.default is MISSING:
        return None
    return str(field.default).lower() if field.default in (None, True, False) else str(field.default)
