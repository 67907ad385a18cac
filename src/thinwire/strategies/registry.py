"""Strategies by name: list them, describe their settings, build one from text.

Nothing here imports torch, so that `thinwire strategies` and `--help` answer at once.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

from thinwire.errors import SettingError, check

if TYPE_CHECKING:
    from thinwire.strategies.base import Strategy

# A new strategy is one more line here.
_KNOWN: Mapping[str, str] = {
    "silent": "thinwire.strategies.silent:Silent",
    "all-reduce": "thinwire.strategies.all_reduce:AllReduce",
    "gossip-grad": "thinwire.strategies.gossip_grad:GossipGraD",
    "topk": "thinwire.strategies.topk:TopK",
    "gtopk": "thinwire.strategies.gtopk:GTopK",
    "oktopk": "thinwire.strategies.oktopk:OkTopK",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of a strategy."""

    name: str
    type: str
    default: str | None
    """As one would write it; None if the setting must be given."""
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What `thinwire strategies` prints of one."""

    name: str
    summary: str
    settings: tuple[Setting, ...]


def names() -> tuple[str, ...]:
    """The names of all strategies."""
    return tuple(_KNOWN)


def load(name: str) -> type[Strategy]:
    """The class of a strategy; SettingError with the known names if there is none."""
    if name not in _KNOWN:
        close = difflib.get_close_matches(name.lower().replace("_", "-"), _KNOWN, n=1, cutoff=0.5)
        raise SettingError(
            f"strategy must be one of {', '.join(_KNOWN)}, got {name!r}",
            hint=f"did you mean {close[0]!r}?"
            if close
            else "`thinwire strategies` lists them with their settings",
        )
    module, _, attribute = _KNOWN[name].partition(":")
    return cast("type[Strategy]", getattr(import_module(module), attribute))


def build(name: str, settings: Mapping[str, object] | None = None) -> Strategy:
    """A strategy with `settings`; text is read by the type of its field, other values are taken as they are.

    >>> build("all-reduce", {"overlap": "none"}).overlap
    'none'
    """
    cls = load(name)
    known = {field.name: field for field in _fields(cls)}
    values: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        field = known.get(key.replace("-", "_"))
        if field is None:
            raise SettingError(f"{name} has no setting {key!r}", hint=_known_settings(name))
        values[field.name] = _read(field, cls, value) if isinstance(value, str) else value
    for field in known.values():
        if field.name not in values and _default_text(field) is None:
            raise SettingError(f"{name} needs the setting {field.name!r}", hint=_known_settings(name))
    return cls(**values)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Name and settings out of `name:key=value:key=value`; wrong ones are refused here.

    >>> parse("all-reduce:overlap=none")
    ('all-reduce', {'overlap': 'none'})
    """
    name, *pairs = text.split(":")
    for pair in pairs:
        check("=" in pair, "strategy", "NAME or NAME:KEY=VALUE:KEY=VALUE", text)
    settings = dict(pair.split("=", 1) for pair in pairs)
    build(name, settings)
    return name, settings


def resolved(strategy: Strategy) -> dict[str, object]:
    """The settings a strategy really has, defaults included, such that `build` takes them again.

    Only plain values: others cannot be written as text, so they can only be what the strategy starts with.
    """
    values = {field.name: getattr(strategy, field.name) for field in _fields(type(strategy))}
    return {
        name: value for name, value in values.items() if isinstance(value, bool | int | float | str | None)
    }


def describe(name: str) -> Description:
    """The strategy's one line and its settings with their defaults and docs."""
    cls = load(name)
    docs = _field_docs(cls)
    settings = tuple(
        Setting(
            name=field.name,
            type=_type_text(_hint(field, cls)),
            default=_default_text(field),
            doc=docs.get(field.name, ""),
        )
        for field in _fields(cls)
    )
    return Description(name=name, summary=(inspect.getdoc(cls) or "").split("\n", 1)[0], settings=settings)


def _fields(cls: type[Strategy]) -> list[Field[Any]]:
    return [field for field in fields(cast("Any", cls)) if field.init]


def _known_settings(name: str) -> str:
    settings = describe(name).settings
    if not settings:
        return f"{name} has no settings"
    return "it has " + "; ".join(f"{s.name} ({s.type}): {s.doc}" for s in settings)


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field, its own and inherited, which Python itself throws away."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        docs |= _own_field_docs(each)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # no source at hand (frozen, typed at a prompt): no docs
        return {}
    body = cast("ast.ClassDef", tree.body[0]).body
    docs: dict[str, str] = {}
    for statement, after in pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[field] = " ".join(text.split())
    return docs


def _hint(field: Field[Any], cls: type) -> Any:
    """The type of a field as an object; Any if it is only known to type checkers."""
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    owner = next(each for each in cls.__mro__ if field.name in inspect.get_annotations(each))
    try:
        return typing.get_type_hints(holder, vars(inspect.getmodule(owner)))[field.name]
    except NameError:
        return Any


def _read(field: Field[Any], cls: type, text: str) -> object:
    hint = _hint(field, cls)
    try:
        return _parse(hint, text)
    except ValueError:
        raise SettingError(f"{cls.__name__}.{field.name} must be {_type_text(hint)}, got {text!r}") from None


_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _parse(hint: Any, text: str) -> object:
    """`text` as a value of the type `hint`; ValueError if it is none."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _first(options, lambda option: option if str(option) == text else _refuse(text))
    if origin in (typing.Union, types.UnionType):
        # None and Literal say exactly what they accept, str accepts everything: so it comes last
        return _first(sorted(options, key=lambda option: option is str), lambda option: _parse(option, text))
    if hint is types.NoneType:
        return None if text.lower() == "none" else _refuse(text)
    if hint is bool:
        return _TRUTH[text.lower()] if text.lower() in _TRUTH else _refuse(text)
    if hint in (int, float, str):
        return hint(text)
    return _refuse(text)


def _first(options: typing.Iterable[Any], attempt: Callable[[Any], object]) -> object:
    for option in options:
        try:
            return attempt(option)
        except ValueError:
            continue
    raise ValueError


def _refuse(text: str) -> object:
    raise ValueError(text)


def _type_text(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        words = [str(option) for option in options]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(option) for option in options)
    if hint is types.NoneType:
        return "none"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "a value that only Python code can give")


def _default_text(field: Field[Any]) -> str | None:
    if field.default_factory is not MISSING:
        return str(field.default_factory())
    if field.default is MISSING:
        return None
    return str(field.default).lower() if field.default in (None, True, False) else str(field.default)
