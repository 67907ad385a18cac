"""Recipes by name; nothing here imports torch."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from thinwire.errors import SettingError
from thinwire.recipes.base import Recipe

DEFAULT = "digits-cnn"

# A new recipe is one more line here.
_KNOWN: Mapping[str, str] = {
    "digits-cnn": "thinwire.recipes.digits_cnn:digits_cnn",
    "mnist-cnn": "thinwire.recipes.mnist_cnn:mnist_cnn",
    "cifar-resnet20": "thinwire.recipes.cifar_resnet20:cifar_resnet20",
    "cifar-vgg16": "thinwire.recipes.cifar_vgg16:cifar_vgg16",
    "ptb-lstm": "thinwire.recipes.ptb_lstm:ptb_lstm",
    "ptb-lstm-650": "thinwire.recipes.ptb_lstm:ptb_lstm_650",
    "text-transformer": "thinwire.recipes.text_transformer:text_transformer",
    "higgs-mlp": "thinwire.recipes.higgs_mlp:higgs_mlp",
}


def names() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(_KNOWN)


def get(name: str) -> Recipe:
    """The recipe called `name`, or the one that the user's own `module:function` returns."""
    if ":" in name:
        return _own(name)
    if name not in _KNOWN:
        close = difflib.get_close_matches(name.lower().replace("_", "-"), _KNOWN, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "`thinwire recipes` describes them"
        raise SettingError(f"recipe must be one of {', '.join(_KNOWN)}, got {name!r}", hint=hint)
    return _own(_KNOWN[name])


def _own(place: str) -> Recipe:
    module_name, _, attribute = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # the script `thinwire` does not look for modules where the user is
        sys.path.insert(0, here)
    try:
        function = getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise SettingError(
            f"recipe {place!r} is not there: no module {module_name!r}",
            hint="run it from the folder the module is in, or put that folder on PYTHONPATH",
        ) from None
    except AttributeError:
        raise SettingError(f"recipe {place!r} is not there: {module_name} has no {attribute!r}") from None
    recipe = function() if callable(function) else function
    if not isinstance(recipe, Recipe):
        raise SettingError(f"recipe {place!r} must return a Recipe, got {type(recipe).__name__}")
    return recipe
