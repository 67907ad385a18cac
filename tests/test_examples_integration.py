from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
SINGLE = ROOT / "examples" / "train_single.py"
THINWIRE = ROOT / "examples" / "train_thinwire.py"
GAN = ROOT / "examples" / "gan.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def changed_lines() -> list[str]:
    """What `diff` says about the two scripts, without their docstrings and blank lines."""
    single, thinwire = (path.read_text().splitlines()[1:] for path in (SINGLE, THINWIRE))
    lines = [line for line in difflib.unified_diff(single, thinwire, lineterm="", n=0) if line[1:].strip()]
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def numbers(pattern: str, outputs: list[str]) -> list[float]:
    """The numbers that stand where the pattern says."""
    return [float(number) for output in outputs for number in re.findall(pattern, output)]


def run_torchrun(script: Path) -> str:
    """What two workers have printed, started as the README says."""
    ran = subprocess.run(
        [sys.executable, *TORCHRUN, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_difference_is_four_lines_added() -> None:
    assert [line[0] for line in changed_lines()] == ["+"] * 4


def test_the_readme_shows_that_difference() -> None:
    [shown] = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert [line for line in shown.splitlines() if line[1:].strip()] == changed_lines()


@pytest.mark.processes
def test_every_way_to_start_it_learns_the_same() -> None:
    accuracy = r"test accuracy ([\d.]+)%"
    [single] = numbers(accuracy, run_script(SINGLE))
    world_of_one = numbers(accuracy, run_script(THINWIRE))
    two_workers = numbers(accuracy, [run_torchrun(THINWIRE)])

    assert single >= 98
    assert world_of_one == [single]
    # The batches are the same ones, cut in two; the sums in them round differently, hence the tolerance.
    assert two_workers == pytest.approx([single, single], abs=1)
    assert two_workers[0] == two_workers[1]


@pytest.mark.processes
def test_a_gan_learns_with_both_models_attached() -> None:
    radii = numbers(r"radius of the drawn circle ([\d.]+)", run_script(GAN, workers=2))
    assert radii == pytest.approx([1, 1], abs=0.1)


@pytest.mark.processes
def test_other_launchers_than_torchrun_make_a_world_too(tmp_path: Path) -> None:
    """Slurm scripts and Kubernetes set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing else."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, thinwire as tw\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with tw.attach(model, optimizer, tw.AllReduce()) as link:\n"
        "    print('worker', link.rank, 'of', link.world_size, link.all_reduce([1.0]))\n"
    )
    outputs = run_script(script, workers=2, torchrun=False)
    assert outputs == ["worker 0 of 2 [2.0]\n", "worker 1 of 2 [2.0]\n"]
