"""`thinwire strategies`, `recipes` and `report`: commands that only read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.output import columns, note
from thinwire.recipes import registry as all_recipes
from thinwire.report.page import write_report
from thinwire.strategies import registry as all_strategies
from thinwire.units import as_metric


def strategies(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these; also module:Class of your own.")
    ] = None,
) -> None:
    """List the strategies and their settings."""
    for name in names or all_strategies.names():
        info = all_strategies.describe(name)
        typer.echo(f"{name}\n    {info.summary}")
        rows = [
            (f"{s.name}={'...' if s.default is None else s.default}", f"{s.type}: {s.doc}")
            for s in info.settings
        ]
        typer.echo(columns(rows, left=(0, 1), indent=4), nl=bool(rows))
    note(f"on a command line: --strategy NAME:KEY=VALUE:KEY=VALUE, {all_strategies.EXAMPLES}")


def recipes() -> None:
    """List the recipes and their defaults."""
    for name in all_recipes.names():
        recipe = all_recipes.get(name)
        default = " (default)" if name == all_recipes.DEFAULT else ""
        target = f"{recipe.target.metric} {as_metric(recipe.target.metric, recipe.target.value)}"
        rows = [("--epochs", str(recipe.epochs)), ("--batch-size", f"{recipe.batch_size} per worker")]
        rows.append(("target", target))
        typer.echo(f"{name}{default}\n    {recipe.summary}\n{columns(rows, left=(0, 1), indent=4)}")


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of a run or a benchmark, or one that holds several runs."),
    ],
) -> None:
    """Make a page with plots and tables from the events in DIR: DIR/report.html."""
    written = write_report(folder, note)
    for notice in written.notices:
        note(f"note: {notice}")
    note(written.verdict)
    typer.echo(str(written.page))
