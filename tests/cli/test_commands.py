"""The command line without workers: what it lists, what it refuses, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from tests.cli.command import environment
from tests.holding import holder
from thinwire.cli import main
from thinwire.recipes import registry as recipes
from thinwire.strategies import registry as strategies


def test_version_and_help_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {thinwire.__version__}\n"
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_options_of_train_are_these_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags are few on purpose: what decides a training belongs into a recipe or a strategy."""
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line.split()[0] for line in lines if line.strip().startswith("--")]
    assert options == [
        "--strategy",
        "--workers",
        "--oversubscribe",
        "--epochs",
        "--batch-size",
        "--seed",
        "--data",
        "--shuffle",
        "--apoptosis",
        "--elastic",
        "--device",
        "--out",
        "--save-every",
        "--resume",
        "--tensorboard",
        "--profile",
        "--json",
    ]


def test_commands_are_these_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    commands = [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "]
    expected = ("plan", "doctor", "train", "simulate", "strategies", "recipes", "report")
    assert sorted(commands) == sorted((*expected, "lab", "keys", "chaos", "bench", "demo"))


def test_options_of_chaos_are_these_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line.split()[0] for line in lines if line.strip().startswith("--")]
    assert options == [
        *("--workers", "--faults", "--kinds", "--fault", "--seed", "--begin", "--every", "--silence"),
        *("--lab", "--rate", "--sites", "--uplink", "--time-limit", "--out", "--json"),
    ]


def test_chaos_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    for arguments, told in (
        (("--kinds", "cut", __file__), "kinds must be without cut and partition outside --lab"),
        (("--kinds", "melt", __file__), "kind must be"),
        ((*out, "missing.py"), "script must be a file that exists"),
        ((*out, "--fault", "cut:host=1,after=1,seconds=1", __file__), "fault must be without cuts"),
    ):
        assert main(["chaos", *arguments]) == 1
        assert told in capsys.readouterr().err
        for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_what_no_elastic_training_has_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for option in (("--save-every", "5"), ("--profile",), ("--shuffle", "own"), ("--apoptosis", "adaptive")):
        assert main(["train", "--elastic", *option, "--out", str(tmp_path / "run")]) == 1
        assert "where training is elastic" in capsys.readouterr().err


def test_strategies_are_listed_with_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}\n" in out for name in strategies.names())
    assert "    overlap=backward  " in out
    assert strategies.describe("all-reduce").settings[0].doc in out


def test_one_strategy_is_described_by_name_or_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "topk"]) == 0
    known = capsys.readouterr().out
    assert main(["strategies", "thinwire.strategies.topk:TopK"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == known.splitlines()[1:]
    assert "gtopk" not in known


def test_recipes_are_listed_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipes.names())
    assert "digits-cnn (default)" in out
    assert "accuracy 97 %" in out


@pytest.mark.parametrize(
    ("arguments", "status", "error", "hint"),
    [
        (
            "train --strategy alreduce",
            1,
            "strategy must be one of silent, all-reduce",
            "did you mean 'all-reduce'?",
        ),
        ("train --strategy all-reduce:overlap=x", 1, "AllReduce.overlap must be ", ""),
        ("train --strategy all-reduce:overlop=x", 1, "all-reduce has no setting 'overlop'", "it has overlap"),
        ("train --strategy not_there:Mine", 1, "cannot be imported: no module 'not_there'", "PYTHONPATH"),
        (
            "train --strategy math:pi:x=1",
            1,
            "must be a dataclass derived from Strategy",
            "docs/architecture.md",
        ),
        ("strategies thinwire.strategies.topk:TopKK", 1, "has no 'TopKK'", "did you mean 'TopK'?"),
        ("train digit-cnn", 1, "recipe must be one of digits-cnn, mnist-cnn", "did you mean 'digits-cnn'?"),
        ("train mnist-cnn", 1, "MNIST is not part of the package", "train-images-idx3-ubyte"),
        ("train mnist-cnn --data /not/there", 1, "the data folder /not/there does not exist", "--data DIR"),
        ("train ptb-lstm --data /", 1, "no text files in /", "ptb.train.txt"),
        ("train --shuffle rings", 1, "shuffle must be one of 'dealt', 'own', 'ring', got 'rings'", ""),
        ("train --device gpu", 1, "device must be one of 'auto', 'cpu', 'cuda', got 'gpu'", ""),
        ("train --workers 0", 1, "workers must be 1 to 100,000, got 0", ""),
        ("train --workers 99999", 1, "workers must be at most ", "`thinwire simulate`"),
        ("train --workers 9999 --oversubscribe", 1, "workers must be at most 1,024, got 9999", "fewer"),
        ("train --epochs 9999999", 1, "epochs must be 1 to 1,000,000, got 9999999", ""),
        (
            "train --data /",
            1,
            "data must be left out: this recipe's data is in the package, got '/'",
            "--data",
        ),
        (
            "train sys:exit",
            1,
            "a function that returns one, got a builtin_function_or_method",
            "docs/recipes",
        ),
        (
            "train math:sin",
            1,
            "a function that returns one, got a builtin_function_or_method",
            "docs/recipes",
        ),
        (
            "train os:walk",
            1,
            "without arguments that returns a Recipe: missing a required argument: 'top'",
            "",
        ),
        ("train random:Random", 1, "a function that returns one, got the class Random", "docs/recipes"),
        ("train --strategy sys:exit", 1, "derived from Strategy, got a builtin_function", "docs/"),
        ("train --resume", 1, "--resume needs --out: the folder of the run to resume", ""),
        ("train --save-every -1", 1, "save every must be 0 or more steps, got -1", ""),
        ("train --strategy all-reduce:overlap", 1, "strategy must be NAME or NAME:KEY=VALUE", "for example"),
        ("train --worker 2", 2, "no such option: --worker", "see `thinwire train --help`"),
        ("train --workers two", 2, "'--workers'", "see `thinwire train --help`"),
        ("training", 2, "no such command 'training'", "see `thinwire --help`"),
    ],
)
def test_wrong_input_is_one_error_and_a_hint(
    arguments: str, status: int, error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert len(lines) == (2 if hint else 1)
    if hint:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1]


def test_out_that_is_not_empty_is_refused_and_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("results")
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 1  # that is no run
    assert "is not empty" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert main(["train", "--out", str(tmp_path / "precious" / "below")]) == 1
    assert "error: --out must be a folder that can be written to" in capsys.readouterr().err


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_folder_that_another_run_uses_is_refused_and_untouched(
    torchrun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("of that run")
    if torchrun:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    name = ".lock-1" if torchrun else ".lock-0"
    with holder(tmp_path, name) as process:
        assert main(["train", "--out", str(tmp_path), "--resume"]) == 1
        error = capsys.readouterr().err.splitlines()[-2]
        assert error.startswith(f"error: {tmp_path} is in use by process {process.pid} on ")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", name}
    assert (tmp_path / "config.json").read_text() == "of that run"


def test_torchrun_needs_a_common_folder_and_its_own_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 1
    assert "--out must be given under torchrun" in capsys.readouterr().err
    assert main(["train", "--workers", "3", "--out", "x"]) == 1
    assert "workers must be torchrun's 2, got 3" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "2")
    assert main(["train", "--out", "x"]) == 1
    assert "RANK must be 0 to WORLD_SIZE - 1 (1), got 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["train", "--out", "x"]) == 1
    assert "WORLD_SIZE must be a whole number, got 'two'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "train --help",
        "simulate --help",
        "bench --help",
        "lab run --help",
        "chaos --help",
        "recipes",
    ],
)
def test_quick_commands_do_not_import_torch(arguments: str) -> None:
    code = (
        "import sys; from thinwire.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
