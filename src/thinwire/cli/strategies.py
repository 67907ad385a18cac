"""`thinwire strategies`: what there is, and its settings."""

from __future__ import annotations

import typer

from thinwire.cli.output import table
from thinwire.strategies import registry


def strategies() -> None:
    """List the strategies and their settings."""
    for name in registry.names():
        description = registry.describe(name)
        typer.echo(f"{name}\n    {description.summary}")
        rows = [
            (f"--set {s.name}={'...' if s.default is None else s.default}", f"{s.type}: {s.doc}")
            for s in description.settings
        ]
        typer.echo(table(rows, indent=4), nl=bool(rows))
