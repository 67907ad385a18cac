"""Nothing that comes from the network or from a file is unpickled, by us or by torch for us."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import run_processes
from thinwire.wire.values import gather_values

SOURCES = Path(__file__).parents[1] / "src" / "thinwire"
UNPICKLING_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
OF_OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
"""Collectives of torch.distributed that unpickle what they receive."""
OWN_CHILDREN = {"lab/run.py", "lab/supervisor.py", "lab/worker.py", "lab/control.py", "planner/beside.py"}
"""They receive from processes that they have started, by a pipe nobody else can open."""


def suspicious(tree: ast.AST, name: str) -> Iterator[str]:
    """What could unpickle, in one file."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found = {module.split(".")[0]}
                if module.startswith("multiprocessing.connection") and name not in OWN_CHILDREN:
                    yield f"line {node.lineno}: {module}"
                if module.startswith("torch.distributed"):
                    found |= {alias.name for alias in names} & OF_OBJECTS
                    yield from (f"line {node.lineno}: {each}" for each in found & OF_OBJECTS)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=called), keywords=keywords):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                if (owner, called) == ("torch", "load") and given.get("weights_only") != "True":
                    yield f"line {node.lineno}: torch.load"
                if owner == "np" and called == "load" and given.get("allow_pickle", "False") != "False":
                    yield f"line {node.lineno}: np.load"
                if owner in ("dist", "c10d", "distributed_c10d") and called in OF_OBJECTS:
                    yield f"line {node.lineno}: {called}"
                continue
            case _:
                continue
        if name not in OWN_CHILDREN:
            yield from (f"line {node.lineno}: {each}" for each in found & UNPICKLING_MODULES)


def test_no_file_unpickles() -> None:
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if told := list(suspicious(ast.parse(path.read_text()), name)):
            found[name] = told
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list",
        "from multiprocessing.connection import Client",
    ],
)
def test_the_check_finds_it(text: str) -> None:
    assert list(suspicious(ast.parse(text), "some.py"))


def use_everything(folder: Path) -> list[str]:
    """Train, gather values, save and load, and write down every class that a pickle looks up."""
    looked_up: list[str] = []

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            looked_up.append(str(arguments))

    model, optimizer = model_and_optimizer()
    sys.addaudithook(hear)  # for good: the process is of this test alone
    # a strategy without Numba, which keeps its compiled functions as pickles, on this machine alone
    with tw.attach(model, optimizer, tw.AllReduce()) as link:
        for step in range(3):
            step_once(model, optimizer, step, link.rank)
        assert link.all_gather_object({"rank": link.rank}) == [{"rank": 0}, {"rank": 1}]
        with tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint:
            checkpoint.save(3)
        with tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer) as checkpoint:
            assert checkpoint.load() is not None
    assert gather_values(["site", torch.distributed.get_rank()]) == [["site", 0], ["site", 1]]
    return looked_up


@pytest.mark.processes
def test_a_training_unpickles_nothing(tmp_path: Path) -> None:
    assert run_processes(2, use_everything, tmp_path / "saved") == [[], []]
