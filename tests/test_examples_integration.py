from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ddp_attach
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SINGLE = EXAMPLES / "train_single.py"
THINWIRE = EXAMPLES / "train_thinwire.py"
SMALL: dict[str, tuple[object, ...]] = {
    "char_gpt": ("--steps", 6, "--batch", 4),
    "finetune": ("--epochs", 1, "--samples", 160),
    "gan": ("--steps", 40),
    "imagenet": ("--epochs", 2),
}
"""The other examples, by name, with arguments that make them short."""
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
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_example(
    name: str, out: Path, *arguments: object, attach: Callable[..., Any] | None = None
) -> list[str]:
    """What each of two workers has printed; the weights are in `out`."""
    every = (*SMALL[name], "--out", out, *arguments)
    return run_script(EXAMPLES / f"{name}.py", workers=2, arguments=every, attach=attach)


def same_bits(one: Path, other: Path) -> bool:
    """Whether two files hold the same weights."""
    mine, theirs = torch.load(one), torch.load(other)
    return bool(mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine))


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
@pytest.mark.parametrize("name", SMALL)
def test_exact_strategies_end_with_the_bits_of_ddp(name: str, tmp_path: Path) -> None:
    run_example(name, tmp_path / "ddp", attach=ddp_attach.attach)
    ways: list[tuple[str, ...]] = [("--strategy", "all-reduce"), ("--strategy", "all-reduce:overlap=forward")]
    if name == "char_gpt":
        ways.append((*ways[-1], "--compile=eager"))
    for way in ways:
        run_example(name, tmp_path / "thinwire", *way)
        assert same_bits(tmp_path / "thinwire", tmp_path / "ddp"), way


@pytest.mark.processes
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("strategy", ["gossip-grad", "gtopk:density=0.05"])
def test_examples_train_with_strategies_that_send_less(name: str, strategy: str, tmp_path: Path) -> None:
    printed, _ = run_example(name, tmp_path / "weights", "--strategy", strategy)
    first, *_, last = [float(number) for number in re.findall(r"(?:loss|accuracy|radius) ([\d.]+)", printed)]
    assert last < first if name == "char_gpt" else last > first, printed
    assert all(torch.isfinite(value).all() for value in torch.load(tmp_path / "weights").values())


@pytest.mark.processes
def test_a_network_shrinks_on_two_workers_alike() -> None:
    printed, _ = run_script(EXAMPLES / "apoptosis.py", workers=2)
    accuracies, sizes = (
        numbers(r"accuracy ([\d.]+)%", [printed]),
        numbers(r"'parameters': ([\d.]+)", [printed]),
    )
    assert accuracies[-1] >= 93
    assert sizes[-1] < 0.5 * 85002
    assert len((EXAMPLES / "apoptosis.py").read_text().splitlines()) < 40


@pytest.mark.processes
def test_split_layers_train_as_whole_ones(tmp_path: Path) -> None:
    states = []
    for groups, more in ((1, ()), (2, ("--sharded",))):
        out = tmp_path / f"{groups}.pt"
        arguments = ("--groups", groups, "--steps", 8, "--out", out, *more)
        outputs = run_script(EXAMPLES / "hybrid.py", workers=2, arguments=arguments)
        assert "hybrid plan for 2 workers" in outputs[0]
        states.append(torch.load(out))
    for key, value in states[1].items():
        assert torch.allclose(states[0][key], value, atol=1e-4), key


@pytest.mark.processes
def test_a_gan_learns_with_both_models_attached() -> None:
    radii = numbers(r"radius ([\d.]+)", run_script(EXAMPLES / "gan.py", workers=2))
    assert radii[-1] == pytest.approx(1, abs=0.1)


def test_compiling_without_a_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AssertionError, match=r"needs a C\+\+ compiler; install .* or leave --compile out"):
        run_script(EXAMPLES / "char_gpt.py", arguments=["--compile"])


@pytest.mark.processes
def test_a_run_that_had_ended_is_taken_from_its_checkpoint(tmp_path: Path) -> None:
    saving = ("--epochs", 1, "--checkpoints", tmp_path / "checkpoints")
    first, _ = run_example("imagenet", tmp_path / "first", *saving)
    again, _ = run_example("imagenet", tmp_path / "again", *saving)
    assert "epoch 1" in first
    assert "epoch" not in again
    assert same_bits(tmp_path / "first", tmp_path / "again")


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
