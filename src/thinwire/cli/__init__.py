"""The command line: `thinwire`. A command parses, calls the library, and prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import thinwire
from thinwire.cli import bench, chaos, demo, doctor, keys, lab, plan, show, simulate, train
from thinwire.cli.output import fail
from thinwire.errors import ThinwireError

INTERRUPTED = 130

app = typer.Typer(
    name="thinwire",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    plan.plan,
    doctor.doctor,
    train.train,
    simulate.simulate,
    show.strategies,
    show.recipes,
    show.report,
):
    app.command()(_command)
app.add_typer(lab.app, name="lab")
app.add_typer(keys.app, name="keys")
app.command(context_settings={"allow_interspersed_args": False})(chaos.chaos)
app.command()(bench.bench)
app.command()(demo.demo)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {thinwire.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _thinwire(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train PyTorch models on machines joined by ordinary networks."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Some versions of Typer bring their own copy of click; in both, this class is two above BadParameter.
_ParseError: Any = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        status = app(
            None if arguments is None else list(arguments), prog_name="thinwire", standalone_mode=False
        )
    except ThinwireError as error:
        return fail(error.message, error.hint)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (
        OSError
    ) as error:  # no command can foresee them all: a full disk, a name too long, a file that is gone
        place = "" if error.filename is None else f"{error.filename}: "
        return fail(f"{place}{error.strerror or error}")
    except _ParseError as error:
        message, context = error.format_message(), getattr(error, "ctx", None)
        hint = f"see `{context.command_path if context else 'thinwire'} --help`"
        return fail(message[:1].lower() + message[1:].rstrip("."), hint, status=2)
    return status if isinstance(status, int) else 0
