"""Recipes by name; nothing here imports torch."""

from __future__ import annotations

from thinwire.errors import SettingError
from thinwire.imports import did_you_mean, import_object
from thinwire.recipes.base import Recipe

DEFAULT = "digits-cnn"

# A new recipe is one more name here, and the function of that name in catalog.py.
_NAMES = (
    "digits-cnn",
    "mnist-cnn",
    "cifar-resnet20",
    "cifar-vgg16",
    "ptb-lstm",
    "ptb-lstm-650",
    "text-transformer",
    "higgs-mlp",
)


def names() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return _NAMES


def get(name: str) -> Recipe:
    """Return the recipe called `name`, or the one that the user's own `module:function` returns."""
    if ":" not in name and name not in _NAMES:
        meant = name.lower().replace("_", "-")
        hint = did_you_mean(meant, _NAMES, otherwise="`thinwire recipes` describes them")
        raise SettingError(f"recipe must be one of {', '.join(_NAMES)}, got {name!r}", hint=hint)
    place = name if ":" in name else f"thinwire.recipes.catalog:{name.replace('-', '_')}"
    found = import_object(place, field="recipe")
    recipe = found() if callable(found) else found  # a constant is accepted too
    if not isinstance(recipe, Recipe):
        raise SettingError(f"recipe {place!r} must return a Recipe, got {type(recipe).__name__}")
    return recipe
