"""`thinwire keys`: keys that let workers join an elastic world."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Keys that let workers join an elastic training."""


@app.command()
def new(file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")]) -> None:
    """Make a new key, in a file that only you can read."""
    from thinwire.elastic.keys import write_key

    write_key(file)
    typer.echo(f"{file}: give the same file to all workers, in THINWIRE_KEY_FILE", err=True)
