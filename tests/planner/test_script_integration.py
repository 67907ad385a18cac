"""A script is measured as it is; one that fails or never steps is named."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from thinwire.errors import SettingError, UsageError
from thinwire.planner.script import measure_script

TRAIN = """
import time, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    time.sleep(0.01)  # of forward
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    time.sleep(0.02)  # of the rest
    optimizer.step()
"""
SLOW_OPTIMIZER = """
import time, torch
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure() if closure else None
        time.sleep(0.03)
        super().step()
        return loss
model = torch.nn.Linear(64, 10)
optimizer = Slow(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    return loss
while True:
    CALL
"""


def written(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


def test_steps_are_timed_without_changing_the_script(tmp_path: Path) -> None:
    found = measure_script([written(tmp_path, TRAIN)])
    assert found.name == "train.py"
    assert found.shapes == ((128, 64), (128,), (10, 128), (10,))
    assert found.forward_s >= 0.01
    assert found.backward_s >= 0.02
    assert found.shares is not None
    assert len(found.shares) == 4
    assert not found.normalised


def test_the_kind_of_optimizer_is_seen(tmp_path: Path) -> None:
    assert measure_script([written(tmp_path, TRAIN.replace("optim.SGD", "optim.AdamW"))]).normalised


@pytest.mark.parametrize(
    ("call", "apart"), [("closure(); optimizer.step()", True), ("optimizer.step(closure)", False)]
)
def test_the_optimizers_step_is_apart_unless_backward_is_in_it(
    tmp_path: Path, call: str, apart: bool
) -> None:
    found = measure_script([written(tmp_path, SLOW_OPTIMIZER.replace("CALL", call))])
    assert found.compute_s >= 0.03
    assert found.optimizer_s >= 0.03 if apart else found.optimizer_s == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('no data')", "failed with exit code 1 before it could be timed.*no data"),
        ("print('done')", "^train.py ended before it could be timed: train.py made 0 optimizer steps: there"),
        (TRAIN.replace("while True", "for _ in range(4)"), "made only 4 optimizer steps: 5 are needed"),
        ("import sys; sys.exit(3)", r"failed with exit code 3(?s:.*)does `python .*train.py` run here"),
    ],
)
def test_a_script_that_does_not_train_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measure_script([written(tmp_path, text)])


def test_a_script_that_never_steps_ends(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did not make enough optimizer steps"):
        measure_script([written(tmp_path, "import time; time.sleep(60)")], limit_s=4)


def test_what_a_script_has_started_ends_with_it(tmp_path: Path) -> None:
    text = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
raise ValueError("no data")
"""
    with pytest.raises(UsageError, match="no data"):
        measure_script([written(tmp_path, text)], limit_s=300)
    pid = int((tmp_path / "child").read_text())
    with suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.05)


def test_several_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """None of them rests before all have been timed: those that come late find all others at work."""
    text = TRAIN.replace(
        "while True:",
        f"""
import fcntl, pathlib
lock = pathlib.Path({str(tmp_path / "lock")!r}).open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
first = not pathlib.Path({str(tmp_path / "first")!r}).exists()
pathlib.Path({str(tmp_path / "first")!r}).touch()
fcntl.flock(lock, fcntl.LOCK_UN)
time.sleep(0 if first else 1)
while True:""",
    ).replace("time.sleep(0.02)", "time.sleep(0.02 if first else 0.05)")
    found = measure_script([written(tmp_path, text)], at_once=2)
    assert found.backward_s >= 0.05  # the slowest counts


def test_no_script() -> None:
    with pytest.raises(SettingError, match="script must be a file"):
        measure_script(["nowhere.py"])
