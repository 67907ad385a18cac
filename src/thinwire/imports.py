"""Imports objects that a user names as `module:attribute`; no torch."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from thinwire.errors import SettingError


def import_user_module(name: str, *, field: str) -> ModuleType:
    """Import a module, also from the current folder; SettingError says why it cannot be imported."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise SettingError(f"{field} cannot be imported: {name!r} is not the name of a module")
    here = str(Path.cwd())
    if here not in sys.path:  # neither the script `thinwire` nor a worker looks for modules there
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        hint = "run it from the folder the module is in, or put that folder on PYTHONPATH"
        if not is_absent(error, name):
            hint = f"the module was found; {place_of(error)}"
        why = f"no module {name!r}" if is_absent(error, name) else f"{type(error).__name__}: {error}"
        raise SettingError(f"{field} cannot be imported: {why}", hint=hint) from error


def place_of(error: BaseException) -> str:
    """Where in a user's file an error is."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else last[:2]
    return f"the error is at {place[0]}, line {place[1]}"


def is_absent(error: BaseException | None, name: str) -> bool:
    """Whether an import failed because the module itself, not one that it imports, does not exist."""
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    return absent is not None and f"{name}.".startswith(f"{absent}.")


def import_object(place: str, *, field: str) -> object:
    """Import `module:attribute`; SettingError says what is wrong with it.

    >>> import_object("math:pi", field="number")
    3.141592653589793
    """
    module_name, _, attribute = place.partition(":")
    module = import_user_module(module_name, field=f"{field} {place!r}")
    try:
        return getattr(module, attribute)
    except AttributeError:
        file = getattr(module, "__file__", None) or "Python itself"
        raise SettingError(
            f"{field} {place!r} cannot be imported: {module_name} has no {attribute!r}",
            hint=did_you_mean(attribute, vars(module), otherwise=f"it was imported from {file}"),
        ) from None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The hint for an unknown name: the known one that is most like it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise
