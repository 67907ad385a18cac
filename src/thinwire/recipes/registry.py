"""Recipes by name; nothing here imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from thinwire.errors import SettingError, ThinwireError
from thinwire.imports import did_you_mean, import_object, place_of
from thinwire.recipes.base import Recipe

DEFAULT = "digits-cnn"

# A new recipe is one more name here, and the function of that name in catalog.py.
_NAMES = (
    *("digits-cnn", "mnist-cnn", "cifar-resnet20", "cifar-vgg16", "digits-wide"),
    *("ptb-lstm", "ptb-lstm-650", "text-transformer", "higgs-mlp"),
)


def names() -> tuple[str, ...]:
    return _NAMES


def get(name: str) -> Recipe:
    """Return the recipe called `name`, or the one that the user's own `module:function` returns."""
    if ":" not in name and name not in _NAMES:
        meant = name.lower().replace("_", "-")
        hint = did_you_mean(meant, _NAMES, otherwise="`thinwire recipes` describes them")
        raise SettingError(f"recipe must be one of {', '.join(_NAMES)}, got {name!r}", hint=hint)
    place = name if ":" in name else f"thinwire.recipes.catalog:{name.replace('-', '_')}"
    found = import_object(place, field="recipe")
    # a constant is accepted too; others, like sys.exit, are not called to see what they return
    recipe = _call(found, place) if inspect.isfunction(found) or isinstance(found, partial) else found
    if not isinstance(recipe, Recipe):
        kind = f"the class {recipe.__name__}" if isinstance(recipe, type) else f"a {type(recipe).__name__}"
        raise SettingError(
            f"recipe {place!r} must be a Recipe or a function that returns one, got {kind}",
            hint="docs/recipes.md describes how a recipe is written",
        )
    return recipe


def _call(function: Callable[[], object], place: str) -> object:
    """Call a user's function without arguments; SettingError says why it cannot be called."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        rule = "a function without arguments that returns a Recipe"
        raise SettingError(f"recipe {place!r} must be {rule}: {error}") from None
    try:
        return function()
    except ThinwireError:
        raise
    except (Exception, SystemExit) as error:
        why = f"recipe {place!r} raises {type(error).__name__}: {error}"
        raise SettingError(why, hint=place_of(error)) from error
