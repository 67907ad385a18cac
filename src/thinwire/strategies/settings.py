"""The settings of a strategy by the types of their fields: checked, read from text, described.

Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import numbers
import sys
import types
import typing
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, Literal

from thinwire.errors import check


def check_types(strategy: object) -> None:
    """Raise SettingError for a setting of another type than its field's. Where a strategy has a
    `__post_init__` of its own, this is its first line, so that the others may compare numbers.

    >>> from thinwire.strategies.topk import TopK
    >>> TopK(density="0.1")
    Traceback (most recent call last):
        ...
    thinwire.errors.SettingError: TopK.density must be a number, got '0.1'
    """
    cls = type(strategy)
    for field in fields(strategy):  # type: ignore[arg-type]  # a dataclass, like every strategy
        hint, value = hint_of(field, cls), getattr(strategy, field.name)
        check(_fits(hint, value), f"{cls.__name__}.{field.name}", type_text(hint, in_python=True), value)


def _fits(hint: Any, value: object) -> bool:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(option, value) for option in options)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in options
    if hint in (int, float):  # numbers of NumPy are as good as Python's; true and false are none
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return hint not in (bool, str, types.NoneType) or isinstance(value, hint)


def hint_of(field: Field[Any], cls: type) -> Any:
    """The type of a field as an object; Any if it is only known to type checkers."""
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    owner = next(each for each in cls.__mro__ if field.name in inspect.get_annotations(each))
    module = sys.modules.get(owner.__module__)  # none: typed at a prompt
    try:
        return typing.get_type_hints(holder, vars(module) if module else {})[field.name]
    except NameError:
        return Any


_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_SCALARS = {int: "a whole number", float: "a number", str: "text"}


def parse_value(hint: Any, text: str) -> object:
    """Read `text` as a value of the type `hint`; ValueError or KeyError if it is not one."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(options, key=lambda option: option is str):  # which accepts every text
            with suppress(ValueError, KeyError):
                return parse_value(option, text)
    if origin is Literal:
        return {str(option): option for option in options}[text]
    if hint in (types.NoneType, bool):
        return (_TRUTH if hint is bool else {"none": None})[text.lower()]
    if hint in _SCALARS:
        return hint(text)
    raise ValueError(text)


def type_text(hint: Any, *, in_python: bool = False) -> str:
    """The rule for a value, as it is written on a command line or in Python, where a choice has quotes."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and in_python:
        return "one of " + ", ".join(map(repr, options))
    if origin is Literal:
        words = [str(option) for option in options]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(option, in_python=in_python) for option in options)
    constants: dict[Any, str] = {bool: "True or False", types.NoneType: "None"}
    text = (constants | _SCALARS).get(hint, "a value that only Python code can give")
    return text.lower() if hint in constants and not in_python else text
