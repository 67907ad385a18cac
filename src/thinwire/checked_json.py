"""JSON from files that may be damaged: parsed, and held against the types that a reader relies on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, get_args, get_origin

_MOST = 1e39
"""Beyond the largest number of float32: a loss may be that large."""
_MOST_COUNT = 1 << 62


def parse_json(text: bytes) -> Any:
    """The content of JSON text; ValueError if it is none. Half a character cannot be printed, and is `?`."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b"\\ud" in text.lower():
        content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return content


def fits(value: object, kind: Any) -> bool:
    """Whether a value from JSON is of a type: an annotation, types by key, or `[type]` for a list.

    Numbers are finite, and integers are counts. Keys may be missing.

    >>> fits(3, int), fits(-3, int), fits(True, int), fits(None, float | None)
    (True, False, False, True)
    >>> fits({"a": [1, "x"]}, {"a": [int]}), fits({}, {"a": [int]})
    (False, True)
    """
    if kind is object:
        return True
    if kind is float:
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < _MOST
    if kind is int:
        return type(value) is int and 0 <= value < _MOST_COUNT
    if isinstance(kind, dict):
        return isinstance(value, dict) and len(fitting(value, kind)) == len(value)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    if origin is UnionType:
        return any(fits(value, each) for each in arguments)
    return isinstance(value, kind)


def fitting(content: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The content without the entries that are not of their type; keys without a type are kept."""
    return {key: value for key, value in content.items() if fits(value, types.get(key, object))}
