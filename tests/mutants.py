"""Does the suite notice a fault? `python -m tests.mutants` injects faults one at a time and reports.

Every fault is applied to a temporary copy of the tree, where the tests that should notice it are run; first
without any fault, so that a test that fails anyway proves nothing. Names as arguments choose faults. The exit
code is 1 if a fault was not caught, or could not be tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "examples", "tools", "pyproject.toml", "README.md", "CHANGELOG.md")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `old` becomes `new` in `file` (under src/thinwire), and `tests` (under tests/) must fail."""

    name: str
    file: str
    old: str
    """Must be in the file exactly once."""
    new: str
    tests: str
    """Arguments for pytest: paths, and -k if only some tests of them should run."""


MUTANTS = [
    Mutant(
        "a division forgotten",
        "strategies/all_reduce.py",
        "bucket.gradient.div_(wire.world_size)",
        "pass",
        "contract/test_strategies.py -k exact_strategies",
    ),
    Mutant(
        "an off-by-one in the peer schedule",
        "topology.py",
        "(place + step) % self.world_size",
        "(place + step + 1) % self.world_size",
        "test_topology.py",
    ),
    Mutant(
        "a residual dropped",
        "compress/select.py",
        "residual[entries.index] = entries.value - wire.to(residual.dtype)",
        "residual[entries.index] = 0",
        "strategies/sparse/test_conservation.py",
    ),
    Mutant(
        "momentum not zeroed where it was applied",
        "strategies/sparse/base.py",
        "            runtime.momentum.mask_(bucket.index, runtime.kept[bucket.index].long())\n",
        "",
        "golden/test_golden.py -k momentum",
    ),
    Mutant(
        "a tail not copied",
        "strategies/sparse/base.py",
        "        message.tail.copy_(reduction.tail)\n",
        "",
        "golden/test_golden.py -k topk",
    ),
    Mutant(
        "thresholds not begun anew",
        "strategies/sparse/base.py",
        "        state.threshold.begin()\n",
        "",
        "contract/test_carry_over.py -k bit_for_bit",
    ),
    Mutant(
        "buckets sent from the last to the first",
        "engine/reducer.py",
        "        bucket = self._buckets[len(self._tasks)]\n        own = bucket.gather_(self.weight)",
        "        bucket = self._buckets[~len(self._tasks)]\n        own = bucket.gather_(self.weight)",
        "exact/test_loops.py",
    ),
    Mutant(
        "a wait for a result removed",
        "engine/reducer.py",
        "        yield all_of(self._tasks)  # one after another would wake this thread for each\n",
        "",
        "exact/test_exact.py -k mlp",
    ),
    Mutant(
        "a stale buffer where a parameter was not used",
        "engine/flat_gradient.py",
        "            self.views[place].zero_()\n",
        "",
        "exact/test_exact.py -k transformer",
    ),
    Mutant(
        "a state field not saved",
        "engine/state.py",
        "if field.init or field.repr]",
        'if (field.init or field.repr) and field.name != "weights"]',
        "contract/test_strategies.py -k state_survives",
    ),
    Mutant(
        "steps not taken from a checkpoint",
        "engine/core.py",
        '        self.steps = max(int(each["steps"]) for each in saved)\n',
        "",
        "contract/test_carry_over.py -k other_buckets",
    ),
    Mutant(
        "a sum over workers not kept",
        "engine/leaves.py",
        "sum(values[rank::world_size], start=torch.zeros_like(values[0]))",
        "values[rank]",
        "contract/test_carry_over.py -k other_buckets",
    ),
    Mutant(
        "collectives issued as they come",
        "wire/sequencer.py",
        "if self._front[phase] != ticket.number:",
        "if self._front[phase] > ticket.number:",
        "contract/test_seam.py -k phases",
    ),
    Mutant(
        "held collectives not started at an end",
        "wire/sequencer.py",
        "            for phase in list(self._front):\n                self._advance(phase)\n",
        "",
        "contract/test_seam.py -k phases",
    ),
    Mutant(
        "a pause that does not wait for messages",
        "wire/messages.py",
        "if all(done >= sent for",
        "if True or all(done >= sent for",
        "wire/test_messages.py -k pause",
    ),
    Mutant(
        "a synchronous mix that goes on beside training",
        "engine/driver.py",
        "soon = self._training if task.in_training else self._background",
        "soon = self._background",
        "contract/test_seam.py -k coming_back",
    ),
    Mutant(
        "a promise to come back forgotten",
        "engine/mixer.py",
        "upcoming >= due + promise.slack",
        "upcoming >= due + promise.slack + 1",
        "golden/test_golden.py -k gossip",
    ),
    Mutant(
        "replicas of a part averaged over all",
        "engine/cut.py",
        "core.assemble(buckets, [group_of.get(bucket.names[0]) for bucket in buckets], piece_bytes, rows)",
        "core.assemble(buckets, [None for bucket in buckets], piece_bytes, rows)",
        "contract/test_groups.py -k two_groups",
    ),
    Mutant(
        "mass given away and kept",
        "strategies/stochastic_gradient_push.py",
        "            masses[chunk] /= 2\n",
        "            pass\n",
        "strategies/test_stochastic_gradient_push.py",
    ),
    Mutant(
        "the whole difference to a peer taken",
        "strategies/gossip_grad.py",
        "values[part.value].add_span_(part.start, change, scale=0.5)",
        "values[part.value].add_span_(part.start, change, scale=1.0)",
        "strategies/gossip",
    ),
]


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source.exists():
                shutil.copy(source, target)
        yield Path(folder)


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    path = tree / "src" / "thinwire" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: the old text is {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)


def run_tests(selection: str, tree: Path, timeout_s: float) -> int:
    """Pytest's exit code; a time-out counts as failed tests, since a fault may hang."""
    words = selection.split()
    paths = [f"tests/{word}" if (tree / "tests" / word.split("::")[0]).exists() else word for word in words]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *paths]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def judge(mutant: Mutant, tree: Path, healthy: dict[str, bool], timeout_s: float) -> str:
    """One of "caught", "MISSED", or why the fault could not be tried."""
    if mutant.tests not in healthy:
        healthy[mutant.tests] = run_tests(mutant.tests, tree, timeout_s) == 0
    if not healthy[mutant.tests]:
        return "NOT TRIED: its tests fail without the fault"
    try:
        with applied(mutant, tree):
            code = run_tests(mutant.tests, tree, timeout_s)
    except ValueError as error:
        return f"NOT TRIED: {error}"
    return {0: "MISSED", 1: "caught"}.get(code, f"NOT TRIED: pytest's exit code was {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults that have one of these words in their name")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one selection")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    healthy: dict[str, bool] = {}
    verdicts = []
    with copy_of_the_tree() as tree:
        for mutant in chosen:
            start = time.monotonic()
            verdicts.append(judge(mutant, tree, healthy, options.timeout))
            row = f"{mutant.name:44} {mutant.file:32} {verdicts[-1]} ({time.monotonic() - start:.0f} s)\n"
            sys.stdout.write(row)
            sys.stdout.flush()
    sys.stdout.write(f"{verdicts.count('caught')} of {len(verdicts)} caught\n")
    return int(verdicts.count("caught") != len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
