"""`thinwire recipes`: what can be trained."""

from __future__ import annotations

import typer

from thinwire.cli.output import table
from thinwire.recipes import registry
from thinwire.units import as_metric


def recipes() -> None:
    """List the recipes and their defaults."""
    for name in registry.names():
        recipe = registry.get(name)
        default = " (default)" if name == registry.DEFAULT else ""
        target = f"{recipe.target.metric} {as_metric(recipe.target.metric, recipe.target.value)}"
        rows = [
            ("--epochs", str(recipe.epochs)),
            ("--batch-size", f"{recipe.batch_size} per worker"),
            ("target", target),
        ]
        typer.echo(f"{name}{default}\n    {recipe.summary}\n{table(rows, indent=4)}")
