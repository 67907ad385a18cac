"""What a machine has room for, and what is said if something is too large for it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from thinwire.errors import SettingError
from thinwire.hosts.machine import Machine, _free_bytes, check_open_files


@pytest.mark.parametrize(
    ("machine", "most", "rule"),
    [
        (Machine(cores=2, free_bytes=20e9), 32, "at most 32 on this machine (2 cores, 20 GB free)"),
        (Machine(cores=64, free_bytes=3e9), 10, "at most 10 on this machine (64 cores, 3 GB free)"),
        (Machine(cores=512, free_bytes=1e15), 1024, "at most 1,024"),
        (Machine(cores=1, free_bytes=0), 1, "at most 1 on this machine (1 cores, 0 GB free)"),
    ],
)
def test_workers_are_bounded_by_memory_and_cores(machine: Machine, most: int, rule: str) -> None:
    machine.check_workers(most)
    with pytest.raises(SettingError) as refused:
        machine.check_workers(most + 1)
    assert refused.value.message == f"workers must be {rule}, got {most + 1}"


def test_one_may_insist_up_to_what_any_machine_starts() -> None:
    small = Machine(cores=1, free_bytes=0)
    small.check_workers(1024, insist=True)
    with pytest.raises(SettingError, match="workers must be at most 1,024, got 1025"):
        small.check_workers(1025, insist=True)
    with pytest.raises(SettingError, match="--oversubscribe to start them anyway"):
        small.check_workers(4)


def test_memory_is_the_least_of_the_machine_and_its_container(tmp_path: Path) -> None:
    assert list(_free_bytes(tmp_path)) == []
    files = {
        "proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB\nHugePages_Total: 0\n",
        "sys/fs/cgroup/memory.max": "2000000\n",
        "sys/fs/cgroup/memory.current": "900000\n",
        "sys/fs/cgroup/memory.stat": "anon 500000\nfile 300000\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(_free_bytes(tmp_path)) == [3_072_000, 1_400_000]
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert list(_free_bytes(tmp_path)) == [3_072_000]


def test_this_machine_has_some() -> None:
    machine = Machine.this()
    assert machine.cores >= 1
    assert machine.free_bytes > 0
    machine.check_workers(1)


def test_too_many_open_files_are_refused() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    check_open_files(10, "hosts", 2)
    if most != resource.RLIM_INFINITY:
        with pytest.raises(SettingError, match="hosts must be fewer"):
            check_open_files(most + 1, "hosts", 9)
