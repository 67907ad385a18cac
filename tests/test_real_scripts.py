"""The benchmark of public scripts: its edits, and a run of a script of our own in place of a clone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.real_scripts.__main__ import SCRIPTS, commands, course, difference, equality
from benchmarks.real_scripts.run import ALONE, DDP, EXACT, PLAIN, run_variant
from benchmarks.real_scripts.script import Script, after, apply_edits, before, num_changed
from benchmarks.real_scripts.start import forked

SOURCE = """\
import torch
torch.manual_seed(0)
x = torch.randn(8, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
SCRIPT = Script(
    repository="someone/something",
    path="train.py",
    commit="0" * 40,
    thinwire=[
        after("import torch", "import thinwire as tw"),
        before(
            "for _ in range",
            "link = tw.attach(model, optimizer, tw.AllReduce())",
            "x = x[link.rank::link.world_size]",
        ),
        ("", "link.detach()\n"),
    ],
    ddp=[
        after("import torch", 'torch.distributed.init_process_group("gloo")'),
        before("for _ in", "model = torch.nn.parallel.DistributedDataParallel(model)"),
        before("for _ in", "x = x[torch.distributed.get_rank()::2]"),
    ],
)


@pytest.fixture
def checkouts(tmp_path: Path) -> Path:
    path = tmp_path / SCRIPT.name
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return tmp_path


def test_edits_add_replace_remove_and_are_counted() -> None:
    text = apply_edits(
        "a\n b\nc\nc\n", [after(" b", "x"), before("c", "y"), ("*c", "d"), ("", "z")], "script"
    )
    assert text == "a\n b\n x\ny\nd\nd\nz"
    assert num_changed("a\nb\nc\n", "a\nB\n") == 2


def test_an_edit_that_does_not_fit_names_script_and_text() -> None:
    with pytest.raises(LookupError, match=r"mine/train.py has no text 'model ='"):
        apply_edits("net = 1\n", [("model =", "x")], "mine/train.py")


def test_every_script_has_another_name_and_the_commands_to_get_it() -> None:
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS) >= 10
    lines = "\n".join(commands(SCRIPTS, Path("clones")))
    assert all(script.commit in lines and script.repository in lines for script in SCRIPTS)


def test_runs_of_unequal_length_are_infinitely_different() -> None:
    assert difference([[1.0, 2.0]], [[1.0]]) == math.inf
    assert difference([[1.0, 2.0]], [[1.0, 1.0]]) == 0.5


@pytest.mark.processes
def test_exact_sgd_is_ddp_bit_for_bit_and_one_worker_is_the_plain_script(checkouts: Path) -> None:
    runs = {each: run_variant(SCRIPT, checkouts, each, forked) for each in (PLAIN, ALONE, DDP, EXACT)}
    assert equality(runs[ALONE], runs[PLAIN]) == equality(runs[EXACT], runs[DDP]) == "same bits"
    assert [len(losses) for losses in runs[EXACT].losses] == [8, 8]
    assert "does not train" not in course(runs[EXACT], SCRIPT)


@pytest.mark.processes
def test_a_script_that_fails_shows_its_error(checkouts: Path) -> None:
    (checkouts / SCRIPT.name).write_text(SOURCE + "raise SystemExit('no more')\n")
    outcome = run_variant(SCRIPT, checkouts, PLAIN, forked)
    assert outcome.exit_code == 1
    assert "no more" in outcome.output
