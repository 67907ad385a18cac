"""The doctor on hosts of the lab, and where there is nobody to measure."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.command import thinwire
from thinwire.errors import PeerLost
from thinwire.planner import doctor
from thinwire.planner.cluster import Cluster


def test_it_says_how_to_start_it(tmp_path: Path) -> None:
    done = thinwire("doctor", "--out", str(tmp_path / "cluster.json"))
    assert done.returncode == 1
    assert "one worker per host" in done.stderr
    assert "torchrun" in done.stderr


def test_one_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEET_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerLost, match="of 3 workers, rank 1, 2 did not reach"):
        doctor._meet(0, 3, ("127.0.0.1", port))


def test_another_program_on_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "STORE_S", 0.5)
    monkeypatch.setattr(doctor, "MEET_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerLost, match=f"cannot reach the first worker at {where}"):
            doctor._meet(1, 2, silent.getsockname())


@pytest.mark.lab
def test_it_names_the_slow_path_and_the_slow_worker(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    hosts = ("--hosts", "4", "--rate", "100mbit*3,10mbit", "--slow", "1=0.4")
    done = thinwire("lab", "run", *hosts, "--", "-m", "thinwire", "doctor", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["found"]["findings"]
    assert any(words.startswith("slow path: host3") for words in found)
    assert any(words.startswith("slow worker: host1") for words in found)
    cluster = Cluster.load(out)
    assert cluster.hosts[3].rate_bit_per_s == pytest.approx(10e6, rel=0.3)
    assert cluster.hosts[0].rate_bit_per_s == pytest.approx(100e6, rel=0.3)


@pytest.mark.lab
def test_a_host_that_cannot_be_reached_is_named_soon(tmp_path: Path) -> None:
    hosts = ("--hosts", "3", "--fault", "cut:host=2,after=0")
    out = str(tmp_path / "cluster.json")
    done = thinwire("lab", "run", *hosts, "--", "-m", "thinwire", "doctor", "--out", out, timeout_s=500)
    assert done.returncode != 0
    assert "host2 (rank 2) cannot reach the first worker" in done.stderr + done.stdout
    assert "rank 2 did not reach" in done.stderr + done.stdout
