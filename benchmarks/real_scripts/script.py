"""A public training script, and the lines to change in it: with thinwire, and with DDP for comparison."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Edit = tuple[str, str]
"""Text to look for, which must be there, and text in its place. The first one is replaced, all of them if the
old text begins with `*`. Without an old text the new one is added at the end."""

STRATEGY = "tw.AllReduce()"
"""What stands in the edits, and is replaced to try other strategies."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, where it is from, and how it is changed and run."""

    repository: str
    path: str
    commit: str
    """Of the version that was tried; later ones may do as well."""
    shrink: Sequence[Edit] = ()
    """Made in every run and not counted: smaller sizes, no GPU, calls that torch has changed."""
    thinwire: Sequence[Edit]
    ddp: Sequence[Edit]
    arguments: Sequence[str] = ()
    of_workers: Sequence[str] = ()
    """More arguments, if there are several workers."""
    files: Callable[[Path], None] = field(default=lambda _folder: None)
    """Writes the data that the script reads into its folder."""
    beside: Sequence[str] = ()
    """Other files of the folder that it imports."""
    whole_batch: bool = False
    """Whether the mean of the workers' losses is the loss of one process: no dropout, noise or batch norm."""
    has_ddp: bool = False
    """Whether the script wraps its model in DDP by itself."""
    falls: bool = True
    """Whether the loss has to fall within these few steps: not so for the two players of a GAN."""

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}"


def apply_edits(text: str, edits: Sequence[Edit], name: str) -> str:
    """The text with all edits made; raises LookupError if the script does not have what one looks for."""
    for old, new in edits:
        everywhere, old = old.startswith("*"), old.removeprefix("*")
        if old not in text:
            raise LookupError(f"{name} has no text {old!r}")
        if not old:
            text = text.rstrip("\n") + "\n" + new
        else:
            text = text.replace(old, new) if everywhere else text.replace(old, new, 1)
    return text


def changes(old: str, new: str, name: str) -> list[str]:
    """The difference of two texts as `diff` shows it, with one line around each change."""
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), name, name, n=1, lineterm=""))


def num_changed(old: str, new: str) -> int:
    """Lines added, replaced or removed."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return sum(max(b - a, d - c) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal")


# -- pieces of edits -----------------------------------------------------------------------------------------


def after(line: str, *added: str) -> Edit:
    """Add lines below a line, as deep as it."""
    depth = line[: len(line) - len(line.lstrip())]
    return line + "\n", "".join(f"{each}\n" for each in (line, *(depth + new for new in added)))


def before(line: str, *added: str) -> Edit:
    """Add lines above a line, as deep as it."""
    depth = line[: len(line) - len(line.lstrip())]
    return line, "".join(f"{depth}{each}\n" for each in added) + line


IMPORT = "import thinwire as tw"
WORLD = "link.rank::link.world_size"
DDP_SETUP = 'torch.distributed.init_process_group("gloo")'
DDP_RANKS = "rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()"


def ddp(model: str) -> str:
    return f"{model} = torch.nn.parallel.DistributedDataParallel({model})"
