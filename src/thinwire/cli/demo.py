"""`thinwire demo`: the point of the product in under three minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.bench.config import DEMO
from thinwire.bench.systems import standard_names
from thinwire.cli.bench import carry_out
from thinwire.cli.output import note

FEW_STEPS = ":density=0.1"
"""A demo has under 200 steps: with their usual density, top-k strategies would hardly change a model."""


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the results (below runs/).")
    ] = None,
) -> None:
    """Train one recipe with every strategy on four emulated hosts joined by 100 Mbit/s, and compare."""
    note("the same training, four workers, a thin wire between them: what each way of talking costs")
    fitting = [f"{name}{FEW_STEPS}" if name.endswith("topk") else name for name in standard_names()]
    carry_out(DEMO, fitting, out)
