"""`thinwire report`: a page about a run, several runs, or a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.output import note
from thinwire.report.write import write_report


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of a run or a benchmark, or one that holds several runs."),
    ],
) -> None:
    """Make a page with plots and tables out of the events in DIR: DIR/report.html."""
    written = write_report(folder, note)
    for words in written.notices:
        note(f"note: {words}")
    note(written.verdict)
    typer.echo(str(written.page))
