"""Predictions against a measured grid: errors, picks, and files that are none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.errors import DataError
from thinwire.lab.nets import parse_net
from thinwire.planner.against import compare
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.predict import Planner
from thinwire.planner.workload import Workload

NET = "params=1e5,layers=4,forward=0.02,backward=0.04"
HOSTS = Cluster(hosts=(ClusterHost(name="host0", rate_bit_per_s=1e8),), latency_s=1e-4, measured="a test")


def grid(folder: Path, factors: dict[str, float], *, full: str = "") -> Path:
    """Steps that take so many times what is predicted."""
    planner = Planner(Workload.of_net(parse_net(NET)), HOSTS)
    cells: list[dict[str, Any]] = [
        {"workers": 4, "rate": "100mbit", "net": NET, "strategy": name, "processor_full": name == full}
        | {"step_s": factor * planner.predict(name, 4).step_s}
        for name, factor in factors.items()
    ]
    clusters = [{"workers": 4, "rate": "100mbit", "cluster": asdict(HOSTS)}]
    file = folder / "plan_grid-1.json"
    file.write_text(json.dumps({"clusters": clusters, "cells": cells}))
    return file


def test_errors_are_those_of_the_cells_that_count(tmp_path: Path) -> None:
    file = grid(tmp_path, {"silent": 1.0, "all-reduce": 1.25, "gossip-grad": 1.0, "sasgd": 9.0}, full="sasgd")
    found = compare(file)
    assert len(found.counted) == 3
    assert found.median_error == pytest.approx(0.0, abs=1e-9)
    assert found.worst.strategy == "all-reduce"
    assert found.worst.error == pytest.approx(-0.2)
    assert found.picks() == (1, 1)


def test_a_pick_that_loses_is_counted(tmp_path: Path) -> None:
    assert compare(grid(tmp_path, {"all-reduce": 1.0, "gossip-grad:share=0.1": 50.0})).picks() == (0, 1)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid(tmp_path, {"silent": 1.0, "all-reduce": 1.1})
    assert main(["plan", "--against", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "2 measured: median error" in said.out
    assert (tmp_path / "against.png").exists()
    assert "against.png" in said.err


@pytest.mark.parametrize("content", ["", "{}", '{"clusters": [], "cells": [{"workers": 2}]}'])
def test_what_is_no_grid_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan_grid-1.json"
    file.write_text(content)
    with pytest.raises(DataError, match="is not the result of a grid"):
        compare(file)
    with pytest.raises(DataError, match="has no plan_grid"):
        compare(tmp_path / "..")


def test_a_proposal_is_one_page_with_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    sizes = ("--params", "1e6", "--layers", "8", "--compute", "0.1s")
    strategies = ("--strategy", "all-reduce", "--strategy", "gossip-grad")
    assert main(["plan", *sizes, *strategies, "--workers", "2,4", "--proposal", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "Efficiency of a worker" in text
    assert "Scaling of 1,000,000 parameters in 8 layers" in text
    assert "How sure this is" in text
    assert (tmp_path / "scaling.png").exists()
    assert (tmp_path / "efficiency.png").exists()
