"""Run one script in one of its variants, in a folder of its own, and collect the losses of all workers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_scripts.script import STRATEGY, Edit, Script, apply_edits
from benchmarks.real_scripts.start import Start

WORKERS = 2

EXACT = "AllReduce()"
EXACTS = (EXACT, 'AllReduce(overlap="forward")')
OTHERS = ("GossipGraD()", "GTopK(density=0.05)")
PLAIN, ALONE, DDP = "plain", "alone", "DDP"
"""As it was cloned; with thinwire and one worker; with DistributedDataParallel and two."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run did."""

    losses: Sequence[Sequence[float]]
    """Every loss that was gone back from, by worker."""
    exit_code: int
    output: str
    """The last lines that it wrote."""

    @property
    def refusal(self) -> str:
        """What thinwire said if it refused the script."""
        found = re.search(r"^thinwire\.errors\.\w+: (.*)$", self.output, flags=re.MULTILINE)
        return found[1] if found else ""

    @property
    def why(self) -> str:
        """Why it did not end well; nothing if it did."""
        if not self.exit_code:
            return ""
        return f"refused: {self.refusal}" if self.refusal else f"failed ({self.exit_code})"

    @property
    def means(self) -> list[float]:
        """Every loss, averaged over the workers."""
        return [sum(each) / len(each) for each in zip(*self.losses, strict=False)]


def edits_of(script: Script, variant: str) -> Sequence[Edit]:
    if variant in (PLAIN, DDP):
        return script.ddp if variant == DDP else ()
    strategy = EXACT if variant == ALONE else variant
    return [(old, new.replace(STRATEGY, f"tw.{strategy}")) for old, new in script.thinwire]


def texts(script: Script, checkouts: Path) -> tuple[str, str, str]:
    """The script in small, the same with thinwire, and with DDP."""
    original = (checkouts / script.repository / script.path).read_text()
    small = apply_edits(original, script.shrink, script.name)
    thinwire, ddp = (apply_edits(small, edits_of(script, each), script.name) for each in (EXACT, DDP))
    return small, thinwire, ddp


def run_variant(script: Script, checkouts: Path, variant: str, start: Start) -> Outcome:
    """Change the script and run it."""
    home = (checkouts / script.repository / script.path).parent
    with tempfile.TemporaryDirectory() as scratch:
        folder, losses = Path(scratch, "a", "b", home.name), Path(scratch, "losses")  # some write to ../..
        folder.mkdir(parents=True)
        losses.mkdir()
        for name in (Path(script.path).name, *script.beside):
            (folder / name).write_text((home / name).read_text())
        main = folder / Path(script.path).name
        edits = [*script.shrink, *edits_of(script, variant)]
        main.write_text(apply_edits(main.read_text(), edits, script.name))
        script.files(folder)
        num_workers = 1 if variant in (PLAIN, ALONE) else WORKERS
        arguments = [*script.arguments, *(script.of_workers if num_workers > 1 else ())]
        exit_code, output = start(losses, main, arguments, num_workers)
        found = [losses / f"{rank}.json" for rank in range(num_workers)]
        return Outcome(
            losses=[json.loads(path.read_text()) if path.exists() else [] for path in found],
            exit_code=exit_code,
            output=output[-4000:],
        )
