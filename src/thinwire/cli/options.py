"""Options and arguments that several commands share; `hosts` and `strategies.registry` parse their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

STRATEGY = "NAME[:KEY=VALUE...]"
NET = "resnet50, or params=5e6,layers=16,..."


def time(text: str) -> Any:
    """An option that is a duration; `hosts.quantities` parses it."""
    return typer.Option(metavar="TIME", help=text)


# Training
Strategies = Annotated[
    list[str], typer.Option("--strategy", metavar=STRATEGY, help="How workers communicate; repeatable.")
]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="See `thinwire recipes`; or module:function of your own.")
]
Epochs = Annotated[int | None, typer.Option(help="Times through the data (the recipe's).")]
BatchSize = Annotated[int | None, typer.Option(help="Samples per worker and step (the recipe's).")]
Seed = Annotated[int, typer.Option(help="Seed of weights, shuffling, dropout and jitter.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the recipe's data.")]
Shuffle = Annotated[
    str, typer.Option(help="dealt: all workers have all data; own: each keeps a part; ring: parts mix.")
]
Apoptosis = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Let the network shrink: conservative, adaptive or aggressive, with settings as in "
        "adaptive:every=100.",
    ),
]
Device = Annotated[
    str, typer.Option(help="auto, cpu or cuda; workers may share a GPU. auto: cuda if there is one.")
]

# Hosts and the paths between them
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Bandwidth of each host: 100mbit, or 1gbit*6,100mbit*2.")
]
Sites = Annotated[str | None, typer.Option(metavar="N+M", help="Hosts per site: 4+4.")]
Uplink = Annotated[str | None, typer.Option(metavar="RATE", help="Bandwidth of each site's uplink.")]
Slow = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST=SPEED", help="A host that computes slower: 3=0.5; repeatable."),
]
Fault = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND:...", help="kill:host=3,step=20; also rejoin, pause, slow, cut, heal; repeatable."
    ),
]

# Emulated accelerators
Scale = Annotated[float, typer.Option(help="Shrinks nets and rates together; seconds stay.")]

# Results
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="New folder for the results (below runs/).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
