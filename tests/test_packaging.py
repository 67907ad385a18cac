from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_TORCH = [
    "errors",
    "events",
    "report.page",
    "strategies",
    "topology",
    "traffic",
    "units",
    "wire.base",
    "cli",
]


def run(*arguments: str, **environment: str) -> str:
    """Run Python with these arguments, and give back what it printed."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, made from a copy so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src" / "thinwire", source / "src" / "thinwire")
    run("-m", "build", "--wheel", "--no-isolation", str(source))
    [built] = (source / "dist").glob("*.whl")
    return built


def test_version_is_the_one_in_pyproject() -> None:
    assert metadata.version("thinwire") == PROJECT["version"]


def test_changelog_has_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == PROJECT["version"]


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "thinwire").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert "thinwire/py.typed" in packed


def test_hard_dependencies_are_torch_numpy_and_the_command_line() -> None:
    assert {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]} == {
        "numpy", "rich", "torch", "typer",
    }  # fmt: skip


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, thinwire.{module}; print('torch' in sys.modules)"
    assert run("-c", code) == "False\n"


@pytest.mark.processes
def test_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
    environment = {"PYTHONPATH": str(installed)}
    assert str(installed) in run("-c", "import thinwire; print(thinwire.__file__)", **environment)
    command = [str(installed / "bin" / "thinwire"), "train", "--workers", "2", "--epochs", "1"]
    run(*command, "--out", str(tmp_path / "out"), **environment)


def test_the_public_names_are_all_there() -> None:
    import thinwire

    assert dir(thinwire) == sorted(thinwire.__all__)
    assert all(getattr(thinwire, name) is not None for name in dir(thinwire))


def test_a_source_folder_works_without_being_installed() -> None:
    """On a machine where nothing can be installed, PYTHONPATH=src is enough."""
    hidden = (
        "from importlib import metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'thinwire': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version; import thinwire; print(thinwire.__version__)\n"
        "from thinwire.cli import main; import sys; sys.argv = ['thinwire', '--version']; main()"
    )
    assert run("-c", hidden).split() == ["unknown", "thinwire", "unknown"]
