"""`thinwire keys`: keys that let workers into a world."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Keys that let workers join a training, and certificates that hide what they send."""


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")],
    tls: Annotated[
        bool, typer.Option("--tls", help="Make a certificate for wire='tls' too, beside it: FILE.pem.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificate is valid.")] = 90,
) -> None:
    """Make a new key, in a file that only you can read."""
    from thinwire.elastic.keys import write_key
    from thinwire.wire.tls.files import beside, make

    if tls:
        make(beside(file), days=days)  # first, as it may fail
    write_key(file)
    typer.echo(f"{file}: give the same file to all workers, in THINWIRE_KEY_FILE", err=True)
    if tls:
        typer.echo(
            f"{beside(file)}: beside it on every worker, for wire='tls'; valid for {days} days", err=True
        )
